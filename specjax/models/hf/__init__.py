"""Reads and writes Hugging Face folders: configuration, weights, tokenizer, chat template.

Open `checkpoint` first: it holds `load` and `save`.

| module | what it holds |
|---|---|
| `config_reader`, `*_fields` | `config.json` to `TransformerConfig` |
| `config_writer` | `TransformerConfig` to `config.json` |
| `weight_map`, `mapped_tensors` | names and shapes of tensors; files mapped into memory |
| `read_shares` | tensors onto the devices of a mesh |
| `tokenizer` | `tokenizer.json` |
| `chat_template` | messages to a prompt |
| `folder`, `progress` | files of a folder, a bar for long loads |
"""
