"""Evaluates a small task by lm-eval through `specjax serve`, next to transformers.

python -m benchmarks.serve.evaluate --out evaluate.json

The model is the target that ships with specjax, in float32. lm-eval asks the server, by its own
`local-completions`: log-likelihoods of choices and of whole texts, and greedy texts. It also says
which continuations are greedy. transformers computes all of that from the same tokens. It needs
lm-eval with its extra api, torch and transformers; `make lm-eval` installs them.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

# Nothing here is on the hub.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import torch
import transformers

from benchmarks.record import save
from benchmarks.serve.process import server
from specjax import models

QUESTIONS = pathlib.Path(__file__).with_name("questions.json")
MOST_DIFFERENCE = 2e-4
# The target's end token.
END = 0


def write_model(folder: pathlib.Path) -> None:
    """Writes the target that ships with specjax, in float32."""
    source = models.pretrained_folder("target")
    target, config = models.load(source, "float32")
    models.save(folder, target.params, config, models.load_tokenizer(source))


def tasks(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Tasks of local JSON: choices, whole texts, and greedy continuations."""
    rows = json.loads(QUESTIONS.read_text())
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    return [
        common
        | {
            "task": "local_choices",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        common
        | {
            "task": "local_texts",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        common
        | {
            "task": "local_greedy",
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


class Reference:
    """Scores and continues texts by transformers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self._tokenizer = models.load_tokenizer(folder)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @torch.no_grad()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-likelihood of a continuation, and whether each of its tokens is the likeliest."""
        ids = torch.tensor([context + continuation])
        rows = self._model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        tokens = ids[0, len(context) :]
        values = rows[torch.arange(len(tokens)), tokens]
        return float(values.sum()), bool((rows.argmax(-1) == tokens).all())

    def choice(self, context: str, continuation: str) -> tuple[float, bool]:
        """Splits the tokens of a text as lm-eval does: the context's own come first."""
        size = len(context) - len(context.rstrip())
        if size:
            context, continuation = context[:-size], context[-size:] + continuation
        whole, own = self.encode(context + continuation), self.encode(context)
        return self.score(own, whole[len(own) :])

    @torch.no_grad()
    def greedy(self, text: str, most: int) -> str:
        """The greedy continuation of a text, up to the end token or an empty line."""
        ids = self.encode(text)
        for _ in range(most):
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == END:
                break
        before = self._tokenizer.decode(self.encode(text))
        return self._tokenizer.decode(ids)[len(before) :].split("\n\n")[0]


def compare(samples: dict[str, Any], reference: Reference) -> dict[str, Any]:
    """Returns the differences of the server from transformers: answers, and the largest value."""
    wrong: list[Any] = []
    worst, count = 0.0, 0
    for sample in samples["local_choices"]:
        for arguments, response in zip(sample["arguments"], sample["resps"], strict=True):
            value, is_greedy = reference.choice(*arguments)
            got, got_greedy = response[0]
            worst, count = max(worst, abs(got - value)), count + 1
            wrong += [arguments] if got_greedy != is_greedy else []
    for sample in samples["local_texts"]:
        ids = reference.encode(sample["arguments"][0][0])
        # The first token follows the end token: lm-eval puts it there.
        value, _ = reference.score([END], ids)
        worst, count = max(worst, abs(sample["resps"][0][0] - value)), count + 1
    for sample in samples["local_greedy"]:
        text, options = sample["arguments"][0]
        expected, count = reference.greedy(text, options["max_gen_toks"]), count + 1
        wrong += [(sample["resps"][0][0], expected)] if sample["resps"][0][0] != expected else []
    return {"compared": count, "largest_difference": worst, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name, "target")
        write_model(folder)
        with server(folder, "--max-logprobs", "1", "--num-slots", "8") as (port, _):
            address = f"http://127.0.0.1:{port}/v1/completions"
            options = f"model=target,base_url={address},num_concurrent=8,max_length=1024"
            results = lm_eval.simple_evaluate(
                model="local-completions",
                model_args=options + ",batch_size=4",
                tasks=tasks(pathlib.Path(name)),
                log_samples=True,
                bootstrap_iters=0,
            )
        record = compare(results["samples"], Reference(folder))
    record |= {"accuracy": results["results"]["local_choices"]["acc,none"]}
    record |= {"lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
    print(json.dumps(record))
    save(args.out, record)
    if record["wrong"] or record["largest_difference"] > MOST_DIFFERENCE:
        sys.exit("the server and transformers differ.")


if __name__ == "__main__":
    main()
