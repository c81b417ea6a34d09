"""A refusal is a short sentence, however long or deep what a folder's files say is."""

import functools
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.models import chat_prompt, draft_kind, load_tokenizer
from specjax.models.heads.head_folder import open_head
from specjax.models.heads.head_formats import EAGLE3
from specjax.models.hf.config_fields import _FIELDS, read_field
from specjax.models.hf.config_json import read_fields, refuse_unread
from specjax.models.hf.mapped_tensors import MappedTensors

LONG = "a" * 10**6


def nested(levels, value="a" * 30):
    for _ in range(levels):
        value = [value] * 7
    return value


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


VALUES = {
    "long": LONG,
    "long list": ["a" * 99] * 10**4,
    "long key": {LONG: LONG},
    "wide at each level": nested(6),
    "deep": deep(10**5),
}
each_value = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def refusal(call, *arguments):
    with pytest.raises(ValueError, match=r"[.]$") as caught:
        call(*arguments)
    assert len(str(caught.value)) < 700


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path.parent


@each_value
def test_values_of_fields_are_quoted_shortly(value):
    for name in _FIELDS:
        if not _FIELDS[name].is_valid(value):
            refusal(read_field, name, {name: value}, "config.json")
    refusal(read_fields, {"model_type": value})
    llama = {"model_type": "llama"}
    for field in ("logit_scale", "architectures", "layer_types"):
        refusal(refuse_unread, llama | {field: value}, "config.json", (), {})
    refusal(read_fields, llama | {"quantization_config": {"quant_method": value}})
    for rope in ({"rope_type": value}, {"type": value}, {"rope_type": "linear", "factor": value}):
        refusal(read_fields, llama | {"rope_scaling": rope})
    refusal(chat_prompt, "/", [value])


def test_names_of_tensors_and_files_are_quoted_shortly(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    for index in ({LONG: "model.safetensors"}, {"a": LONG}, {"a": LONG + "/b"}):
        refusal(MappedTensors, write(path, {"weight_map": index}))
    path.unlink()
    save_file({LONG: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    refusal(MappedTensors(tmp_path).check_all_read, [])
    header = json.dumps({LONG: {"dtype": LONG, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refusal(MappedTensors, tmp_path)


def test_what_libraries_say_of_a_file_is_quoted_shortly(tmp_path):
    refusal(load_tokenizer, write(tmp_path / "tokenizer.json", {"model": {"type": LONG}}))
    refusal(load_tokenizer, write(tmp_path / "tokenizer.json", {"version": LONG}))
    template = "{{ raise_exception(messages[0].content) }}"
    write(tmp_path / "chat_template.jinja", template)
    refusal(chat_prompt, tmp_path, [{"role": "user", "content": LONG}])


def test_fields_of_heads_are_quoted_shortly(tmp_path):
    refusal(draft_kind, write(tmp_path / "config.json", {"speculators_model_type": LONG}))
    fields = {"model_type": "llama", "draft_vocab_size": 9, "hidden_size": LONG}
    path = write(tmp_path / "config.json", fields)
    refusal(functools.partial(open_head, EAGLE3, num_target_layers=4), path)
