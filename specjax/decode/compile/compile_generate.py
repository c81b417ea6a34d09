"""`compile_generate`: the programs of `generate` before the first prompt, and from a file."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from specjax.checks import as_array, check_count
from specjax.config import SpeculativeConfig
from specjax.core.noise import fold_in_rows
from specjax.decode.capacity import as_host_array, explain_out_of_memory, pad_batch_to_mesh, pad_eos
from specjax.decode.compile.cache_folder import is_cache_in_use
from specjax.decode.compile.saved_programs import (
    SavedProgram,
    load_program,
    read_programs,
    serialize_programs,
    write_programs,
)
from specjax.decode.drafters import Drafter, Models
from specjax.decode.generate import (
    Generation,
    check_kept_sets,
    loop_in_place,
    take_first_requests,
)
from specjax.decode.kinds import kinds_of
from specjax.decode.memory import check_memory
from specjax.decode.metrics import Metrics
from specjax.decode.options import LoopOptions, check_capacity
from specjax.decode.prefill import begin_compilation
from specjax.decode.request_batch import (
    RequestArguments,
    check_arguments,
    check_prompt_ids,
    parse_prompts,
)
from specjax.decode.state import RequestBatch, Settings
from specjax.decode.target_step import vocabulary_size
from specjax.decode.token_info import check_token_info, empty_token_info
from specjax.devices.placement import replicate, with_auto_axes
from specjax.file_io import JsonObject
from specjax.processing.sampling_params import FIELDS, SamplingParams
from specjax.types import Model

# Fields of `CompiledGenerate` that a file holds as they are.
_DESCRIBED = ("batch_size", "num_eos_token_ids", "vocab_size", "arguments")
_fold_in_rows = jax.jit(fold_in_rows, static_argnames="size")


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledGenerate:
    """The programs of `generate` for one batch size, one capacity and one set of rules.

    A call takes the data arguments of `generate`, returns a `Generation`, and compiles nothing.

    Attributes:
      batch_size: B.
      num_eos_token_ids: most end-of-sequence ids of a call.
      vocab_size: V.
      config: the `SpeculativeConfig` compiled in.
      options: the `LoopOptions` compiled in, without an implementation if read from a file.
      arguments: name -> dtype and shape of each parameter and each setting.
      programs: three. The first makes keys [B] of one key; the others are `run_prefill` and
        `loop_in_place`.
      serialize: returns these programs as bytes, for `save`.
      functions: name -> function of the models compiled in; {} if they were read from a file.
    """

    batch_size: int
    num_eos_token_ids: int
    vocab_size: int
    config: SpeculativeConfig
    options: LoopOptions
    arguments: dict[str, str]
    programs: Sequence[Callable[..., Any]]
    serialize: Callable[[], list[SavedProgram]]
    functions: dict[str, Any]

    def __call__(
        self,
        target: Model,
        drafter: Drafter | None,
        prompts: Any,
        *,
        keys: jax.Array,
        max_new_tokens: Any,
        temperature: Any = 1.0,
        eos_token_ids: Any = (),
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """Returns the `Generation` of these arguments by the options compiled in.

        Args:
          target: with the functions and the parameters' shapes that were compiled for.
          drafter: with those compiled for, or None.
          prompts: B lists of ids or a tuple (ids, lengths), as each of the following in `generate`.
          keys: typed threefry keys, [B] or ().
          max_new_tokens: int or i32[B].
          temperature: f32, [B] or scalar.
          eos_token_ids: int, ints or i32[E].
          sampling: `SamplingParams` with the fields compiled for, or None.

        Raises:
          ValueError: for what `generate` refuses, texts that the capacity does not hold, and
            another batch size, other rules, parameters or functions than compiled for.
        """
        prompts = _parse_prompts(prompts, self.batch_size)
        arguments = RequestArguments(
            prompts, keys, max_new_tokens, temperature, eos_token_ids, sampling
        )
        requests, _ = check_arguments(target, drafter, arguments, self.config, self.options)
        check_prompt_ids(target, requests, 0, self.vocab_size)
        fold, prefill, run = self.programs
        requests = _broadcast_numbers(requests, self.num_eos_token_ids)
        settings = requests.settings
        if not settings.keys.shape:
            settings = settings._replace(keys=fold(settings.keys))
        _check_arrays(_describe_arguments(target, drafter, settings), self.arguments)
        _check_functions(_list_functions(target=target, drafter=drafter), self.functions)
        filled = pad_batch_to_mesh(requests._replace(settings=settings), target.placement)
        filled = replicate(target.placement, filled)
        models, placement = Models(target, drafter), target.placement
        with explain_out_of_memory(models, *filled.token_ids.shape):
            state = with_auto_axes(prefill, placement, models, filled, like=keys)
            generation, _ = with_auto_axes(run, placement, models, state, like=keys)
        check_kept_sets(generation, self.vocab_size)
        return take_first_requests(generation, self.batch_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the programs to a file, which `load_compiled` reads.

        The file holds no parameters. Where JAX's cache was in use, the programs are compiled anew.

        Args:
          path: of the file, which is replaced if it exists. Its folder is made if it is absent.

        Raises:
          OSError: if the file cannot be written.
          ValueError: if the config has a rule, and for a model over devices.
        """
        if self.functions.get("target.placement") is not None:
            raise ValueError("Programs of a model over devices are not saved; compile them anew.")
        options = dataclasses.asdict(self.options)
        del options["implementation"]  # It is in the programs.
        description = {name: getattr(self, name) for name in _DESCRIBED}
        description |= {"config": self.config.to_json(), "options": options}
        write_programs(path, description, self.serialize())


def compile_generate(
    target: Model,
    drafter: Drafter | None,
    *,
    batch_size: int,
    options: LoopOptions,
    num_eos_token_ids: int = 8,
    sampling: SamplingParams | None = None,
    config: SpeculativeConfig | None = None,
) -> CompiledGenerate:
    """Compiles `generate` before the first prompt, for one device or the mesh of the target.

    The parameters may be `jax.ShapeDtypeStruct`s: weights can be loaded meanwhile or later. A call
    of the result compiles nothing. The folder of `enable_compilation_cache` is read and written.

    Args:
      target: a `Model`; of its parameters, only shapes, dtypes and shardings are read.
      drafter: a `Drafter`, or None.
      batch_size: B, a Python int >= 1.
      options: `LoopOptions`. Its `max_length`, room for a prompt and its text, is needed.
      num_eos_token_ids: most end-of-sequence ids of a call, rounded up to a multiple of 8.
      sampling: `SamplingParams` with any values in the fields that calls give, and `bias`,
        `allowed` and `bad_words` of their shapes. None is no rule.
      config: a `SpeculativeConfig`. None is the default one.

    Returns:
      `CompiledGenerate`, a function like `generate`, which can be saved to a file.

    Raises:
      ValueError: for what `generate` refuses, and parameters that lie on several devices.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> options = specjax.LoopOptions(max_length=16)
      >>> compiled = specjax.compile_generate(model, None, batch_size=1, options=options)
      >>> output = compiled(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=3, temperature=0)
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 0, 1]]
    """
    batch_size = check_count("batch_size", batch_size, 1, "the requests of a call")
    why = "the most end-of-sequence ids of a call"
    num_eos_token_ids = check_count("num_eos_token_ids", num_eos_token_ids, 0, why)
    check_capacity(options, "the tokens of prompt and text")
    key = jax.random.key(0, impl="threefry2x32")
    fold = _fold_in_rows.lower(key, size=batch_size)
    prompts = (np.zeros((batch_size, 1), np.int32), np.ones((batch_size,), np.int32))
    arguments = RequestArguments(prompts, _fold_in_rows(key, size=batch_size), 1, sampling=sampling)
    requests, static = check_arguments(target, drafter, arguments, config, options)
    requests = _broadcast_numbers(requests, num_eos_token_ids)
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((target, drafter))]
    if target.placement is None and any(x and len(x.device_set) > 1 for x in shardings):
        raise ValueError("Parameters lie on several devices; see the mesh of models.load.")
    models = Models(target, drafter)
    check_memory(kinds_of(models, requests), static)
    filled = replicate(target.placement, pad_batch_to_mesh(requests, target.placement))
    lowered, compilations = begin_compilation(loop_in_place, models, filled, static)
    all_lowered = (fold, *lowered)
    programs = [fold.compile(), *(compilation.result() for compilation in compilations)]
    return CompiledGenerate(
        batch_size=batch_size,
        num_eos_token_ids=num_eos_token_ids,
        vocab_size=vocabulary_size(target, batch_size, 1, requests.token_ids.shape[1]),
        config=SpeculativeConfig() if config is None else config,
        options=options,
        arguments=_describe_arguments(target, drafter, requests.settings),
        programs=programs,
        serialize=functools.partial(serialize_programs, all_lowered, programs, is_cache_in_use()),
        functions=_list_functions(target=target, drafter=drafter),
    )


def load_compiled(path: str | os.PathLike[str]) -> CompiledGenerate:
    """Reads what `CompiledGenerate.save` wrote; nothing is traced or compiled.

    Load only a file that you trust: its programs are unpickled, and they are code that runs. Before
    that, the versions and the device in its JSON line are compared with this process, and its
    SHA-256 is checked. The programs contain the models' functions. A call compares names, shapes
    and dtypes of parameters, and cannot tell the models.

    Args:
      path: of the file.

    Returns:
      `CompiledGenerate`.

    Raises:
      ValueError: for a file of another kind, specjax, jax, jaxlib or device, or a damaged one.
      OSError: if the file cannot be read.

    Example:
      >>> import tempfile
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.1, 0.9], [0.8, 0.2]])
      >>> path = tempfile.mkdtemp() + "/programs"
      >>> options = specjax.LoopOptions(max_length=16)
      >>> specjax.compile_generate(model, None, batch_size=1, options=options).save(path)
      >>> output = specjax.load_compiled(path)(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=3, temperature=0)
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 0, 1]]
    """
    description, saved = read_programs(path)
    try:
        described = {name: description[name] for name in _DESCRIBED}
        auto = {"num_speculative_tokens": "auto"} if description["config"]["step_costs"] else {}
        config = SpeculativeConfig(**description["config"] | auto)
        options = LoopOptions(**description["options"])
    except (KeyError, TypeError):
        raise ValueError(
            f"{path} says other things of its programs than this specjax writes; compile and save "
            "it here."
        ) from None
    # Only the structure of what the programs return matters here, so that names stand for arrays.
    listed = jax.eval_shape(lambda: empty_token_info(check_token_info(options, config), ()))
    metrics = Metrics._make(Metrics._fields)
    texts = Generation._make([*Generation._fields[:5], metrics, *listed])
    programs = [load_program(*each) for each in zip(saved, (0, None, None), strict=True)]
    programs[-1] = functools.partial(_run_loaded, programs[-1], texts)
    return CompiledGenerate(
        **described,
        config=config,
        options=options,
        programs=programs,
        serialize=lambda: saved,
        functions={},
    )


def _run_loaded(
    program: Callable[..., Any], texts: Generation, *operands: Any
) -> tuple[Generation, Any]:
    """Returns the results of a loaded `run_loop`, whose arrays come without their structure."""
    leaves, num_texts = program(*operands), len(jax.tree.leaves(texts))
    generation = jax.tree.unflatten(jax.tree.structure(texts), leaves[:num_texts])
    return generation, leaves[num_texts:]


def _parse_prompts(prompts: Any, batch_size: int) -> tuple[Any, Any]:
    """Returns ids and lengths of prompts, or refuses another number of them."""
    token_ids, lengths = parse_prompts(prompts)
    if lengths.shape[0] != batch_size:
        raise ValueError(
            f"prompts has {lengths.shape[0]} of them; it needs {batch_size}, the batch size that "
            "was compiled for."
        )
    return token_ids, lengths


def _broadcast_numbers(requests: RequestBatch, num_eos_token_ids: int) -> RequestBatch:
    """Returns requests whose parameters that are numbers are all [B], as the programs take them."""
    settings, shape = requests.settings, requests.lengths.shape

    def for_each(value: Any) -> Any:
        return None if value is None else np.broadcast_to(as_host_array(value), shape)

    sampling = settings.sampling
    if sampling is not None:
        numbers = [name for name, field in FIELDS.items() if field.parse is None]
        sampling = sampling._replace(**{x: for_each(getattr(sampling, x)) for x in numbers})
    settings = settings._replace(
        temperature=for_each(settings.temperature),
        eos_token_ids=pad_eos(settings.eos_token_ids, num_eos_token_ids),
        sampling=sampling,
    )
    return requests._replace(settings=settings)


def _describe_arguments(
    target: Model, drafter: Drafter | None, settings: Settings
) -> dict[str, str]:
    """Returns name -> dtype and shape of the parameters and settings, and if there is a drafter."""
    tree = {"target": target.params, "drafter": drafter and drafter.params, **settings._asdict()}
    described = {} if drafter is None else {"a drafter": "given"}
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = as_array("a parameter", leaf)
        described[keystr(path, simple=True, separator=".")] = f"{array.dtype}{list(array.shape)}"
    return described


def _check_arrays(call: dict[str, str], compiled: dict[str, str]) -> None:
    """Refuses a call whose arrays are others than programs are compiled for.

    Args:
      call: name -> dtype and shape, of the call.
      compiled: name -> dtype and shape, of the programs.

    Raises:
      ValueError: for the first name that differs.
    """
    for name in compiled | call:
        if call.get(name) != compiled.get(name):
            raise ValueError(
                f"{name} is {call.get(name, 'absent')}; these programs are compiled for "
                f"{compiled.get(name, 'calls without it')}."
            )


def _list_functions(**models: Any) -> JsonObject:
    """Returns name -> value of the fields of models besides parameters, which are compiled in.

    Args:
      **models: each a `Model`, a `Drafter` or None, by its name.
    """
    return {
        f"{name}.{field.name}": getattr(model, field.name)
        for name, model in models.items()
        if model is not None
        for field in dataclasses.fields(model)
        if field.name != "params"
    }


def _check_functions(call: Mapping[str, object], compiled: Mapping[str, object]) -> None:
    """Refuses a call with other functions of models than programs are compiled with.

    Args:
      call: from `_list_functions`, of the call.
      compiled: from `_list_functions`, of the programs.

    Raises:
      ValueError: for the first name that differs.
    """
    for name, value in compiled.items():
        if call[name] != value:
            was = "another function" if callable(value) else repr(value)
            raise ValueError(
                f"{name} is {call[name]!r}, and {was} is compiled in; call with the models that "
                "were compiled, or with others of their functions."
            )
