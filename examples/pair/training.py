"""One trainer for both models: AdamW on random windows, many steps per call, resumable."""

import dataclasses
import functools
import pathlib
import pickle
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.models import TransformerConfig, build, causal_hidden, functions

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
      steps: optimiser steps; None lets `minutes` and the measured speed decide, and
        only equal steps repeat a training.
      minutes: for this model, compilation apart.
      batch: sequences per step.
      length: tokens per sequence.
      peak_rate: learning rate after the warm-up.
      steps_per_call: steps under one compiled scan.
      seed: of the weights and of the order of the data.
      attention: implementation of `jax.nn.dot_product_attention`, None is its own choice.
      dtype: of the products; the optimiser's weights are float32.
      optimizer: "adamw", or "muon" for the matrices and Adam for the rest: better where steps
        are few.
    """

    steps: int | None
    minutes: float
    batch: int
    length: int
    peak_rate: float
    steps_per_call: int
    seed: int
    attention: str | None
    dtype: str
    optimizer: str = "adamw"


def cast(params: Any, dtype: str) -> Any:
    """The parameters in another dtype."""
    return jax.tree.map(lambda array: array.astype(dtype), params)


def logits_of(config: TransformerConfig, params: Any, ids: jax.Array, recipe: Recipe) -> jax.Array:
    """f32[B, T, V]; the layers' products are in the recipe's dtype, the head's in float32."""
    hidden = causal_hidden(config, cast(params, recipe.dtype), ids, recipe.attention)
    return functions(config)[2](params, hidden.astype(jnp.float32))


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clipping and the recipe's optimiser, at rate 1: `rate` scales what it gives."""

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda a: a.ndim > 1, params)

    if recipe.optimizer == "muon":
        # Steps as large as Adam's, so that rates are of one kind.
        muon = optax.contrib.muon(
            1.0, weight_decay=0.1, weight_decay_mask=matrices, adam_b2=0.95, consistent_rms=0.2
        )
        return optax.chain(optax.clip_by_global_norm(1.0), muon)
    adamw = optax.adamw(1.0, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def rate(recipe: Recipe, progress: jax.Array) -> jax.Array:
    """A warm-up over 4 % of the steps, then a cosine down to a fiftieth.

    A function of the share of steps done, so that their number needs no compilation.
    """
    peak = recipe.peak_rate
    return optax.warmup_cosine_decay_schedule(0.0, peak, 40, 1000, peak / 50)(1000 * progress)


def _batch(data: jax.Array, recipe: Recipe, step: jax.Array) -> jax.Array:
    # By address: the windows of a step are a function of the seed and the step alone.
    key = jax.random.fold_in(jax.random.key(recipe.seed), step)
    starts = jax.random.randint(key, (recipe.batch,), 0, data.size - recipe.length)
    return data[starts[:, None] + jnp.arange(recipe.length + 1)[None]]


def _many_steps(loss: Loss, recipe: Recipe) -> Callable[..., Any]:
    update = optimizer(recipe).update

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Any, data: jax.Array, first: jax.Array, steps: jax.Array, extra: Any) -> Any:
        def one(state: Any, step: jax.Array) -> Any:
            params, moments = state
            progress = step / steps
            ids = _batch(data, recipe, step)
            value, grads = jax.value_and_grad(loss)(params, ids, progress, extra)
            updates, moments = update(grads, moments, params)
            scale = rate(recipe, progress)
            params = jax.tree.map(lambda p, u: p + scale * u, params, updates)
            return (params, moments), value

        return jax.lax.scan(one, state, first + jnp.arange(recipe.steps_per_call))

    return run


def _steps_within(minutes: float, run: Callable[..., Any], state: Any, *args: Any) -> int:
    # The state is donated: the measurement spends a copy.
    state, losses = run(jax.tree.map(jnp.copy, state), *args)
    jax.block_until_ready(losses)
    start = time.perf_counter()
    _, losses = run(state, *args)
    jax.block_until_ready(losses)
    calls = int(minutes * 60 / (time.perf_counter() - start))
    return max(1, calls) * losses.size


def _save(path: pathlib.Path, content: dict[str, Any]) -> None:
    content = content | {"state": jax.tree.map(np.asarray, content["state"])}
    spare = path.with_suffix(".new")
    spare.write_bytes(pickle.dumps(content))
    spare.replace(path)


def train(
    name: str,
    config: TransformerConfig | None,
    recipe: Recipe,
    loss: Loss,
    data: jax.Array,
    folder: pathlib.Path,
    extra: Any = None,
    params: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """Trains one model, from its last checkpoint if there is one.

    Args:
      name: of the checkpoint and the progress bar.
      config: of the model, unless `params` are given.
      recipe: how.
      loss: `(params, token_ids[B, T + 1], share of the steps done, extra) -> scalar`.
      data: i32[N], all training tokens.
      folder: for the checkpoint; one that is there is continued.
      extra: what else the loss reads.
      params: to begin with; None is random ones of the configuration.

    Returns:
      The float32 parameters, and steps, seconds and loss curve.
    """
    path, done, curve = folder / f"{name}.checkpoint", 0, []
    params = build(config, seed=recipe.seed).params if params is None else params
    state = (params, optimizer(recipe).init(params))
    run = _many_steps(loss, recipe)
    if path.exists():
        saved = pickle.loads(path.read_bytes())
        state, done, curve, steps = (saved[key] for key in ("state", "done", "curve", "steps"))
    else:
        steps = recipe.steps or _steps_within(
            recipe.minutes, run, state, data, jnp.int32(0), jnp.int32(1000), extra
        )
    steps = -(-steps // recipe.steps_per_call) * recipe.steps_per_call
    last = start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task(name, total=steps, completed=done)
        while done < steps:
            state, losses = run(state, data, jnp.int32(done), jnp.int32(steps), extra)
            done += recipe.steps_per_call
            curve.append((done, float(losses.mean())))
            progress.update(bar, completed=done, description=f"{name} loss {curve[-1][1]:.3f}")
            if time.perf_counter() - last > 60 and done < steps:
                _save(path, {"state": state, "done": done, "curve": curve, "steps": steps})
                last = time.perf_counter()
    _save(path, {"state": state, "done": done, "curve": curve, "steps": steps})
    seconds = time.perf_counter() - start
    print(f"{name}: {steps} steps of {recipe.batch} x {recipe.length} tokens in {seconds:.0f} s")
    return state[0], {"steps": steps, "seconds": round(seconds, 1), "curve": curve}
