"""Hugging Face folders: configurations, weights, chat templates, read and written.

`checkpoint` holds `load`, `load_config`, `load_tokenizer` and `save`. `config_reader` turns
`config.json` into a `TransformerConfig` and refuses what it does not read (`unread_fields`);
`weight_map` names each tensor, and `mapped_tensors` maps the files without a copy on the host. Open
`checkpoint` first. Imported by `specjax.models`.
"""
