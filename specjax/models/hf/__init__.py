"""Reads and writes Hugging Face folders: configuration, weights, tokenizer, chat template.

Open `checkpoint` first: it holds `load`, `save` and `load_tokenizer`.

| module | contents |
|---|---|
| `config_json`, `config_fields`, `rope_fields` | `config.json` to `TransformerConfig` and back |
| `weight_map`, `mapped_tensors` | names and shapes of tensors; files mapped into memory |
| `chat_template` | messages to a prompt |
| `folder` | files of a folder |
"""
