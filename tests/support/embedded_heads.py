"""The embedded EAGLE-3 head with a part of its vocabulary, and the prompts that it drafts after."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from specjax.models import load_tokenizer, pretrained_folder

NUM_DRAFT_TOKENS = 3000
CODE = (
    "def read_lines(path):\n    with open(path) as file:\n        return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def",
    "import numpy as np\n\n\ndef normalize(x):\n    return x /",
    "for name, value in sorted(options.items()):\n    if value is None:",
    "try:\n    result = json.loads(text)\nexcept ValueError as error:",
    "    def test_empty(self):\n        self.assertEqual(",
    "if __name__ == '__main__':\n    parser = argparse.ArgumentParser(",
    "    @property\n    def size(self):\n        return len(self.",
)


def write_part_of_head(folder, *, verifier=None):
    """Writes the embedded head with an lm_head of 3000 tokens; returns fields, tensors and ids.

    verifier: the folder that config.json names as the target.
    """
    own = pretrained_folder("eagle3")
    fields = json.loads((own / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(own / "model.safetensors")
    size = fields["draft_vocab_size"]
    ids = np.sort(np.random.default_rng(0).permutation(size)[:NUM_DRAFT_TOKENS])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
    tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(size), ids)}
    fields |= {"draft_vocab_size": len(ids)}
    if verifier is not None:
        fields["speculators_config"]["verifier"]["name_or_path"] = str(verifier)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return fields, tensors, ids


def code_prompts(length=14):
    """Beginnings of Python, i32[8, length], and how many tokens of each are the prompt."""
    tokenizer = load_tokenizer(pretrained_folder("target"))
    rows = [tokenizer.encode(text).ids[:length] for text in CODE]
    lengths = np.array([len(row) for row in rows], np.int32)
    return np.array([row + [0] * (length - len(row)) for row in rows], np.int32), lengths
