"""`metrics_text`: what an engine counts, in the text format that Prometheus reads."""

from collections.abc import Iterable

from specjax.engine.async_engine import AsyncEngine


def metrics_text(server: AsyncEngine) -> str:
    """Returns counts and states of an engine.

    Tokens, and drafts by their position, are those of requests that have ended.

    Args:
      server: steps the engine.
    """
    engine, totals = server.engine, server.totals
    by_reason = ((f'{{reason="{name}"}}', n) for name, n in sorted(totals.num_requests.items()))
    lines = [
        *_metric("requests", "counter", "Requests that ended.", by_reason),
        *_metric("prompt_tokens", "counter", "Tokens of prompts.", totals.num_prompt_tokens),
        *_metric("tokens", "counter", "Tokens generated.", totals.num_completion_tokens),
        *_metric("drafted", "counter", "Drafted tokens by position.", _each(totals.num_drafted)),
        *_metric("accepted", "counter", "Accepted tokens by position.", _each(totals.num_accepted)),
        *_metric("steps", "counter", "Steps of the slots that hold requests.", engine.num_steps),
        *_metric("waiting", "gauge", "Requests that wait for a slot.", engine.num_waiting),
        *_metric("running", "gauge", "Requests in a slot.", engine.num_running),
        *_metric("slots", "gauge", "Slots.", engine.num_slots),
        *_metric("occupancy", "gauge", "Share of slots in use, over all steps.", engine.occupancy),
    ]
    return "\n".join(lines) + "\n"


def _each(counts: Iterable[int]) -> Iterable[tuple[str, int]]:
    return ((f'{{position="{i}"}}', int(count)) for i, count in enumerate(counts, start=1))


def _metric(
    name: str, kind: str, text: str, values: float | Iterable[tuple[str, float]]
) -> list[str]:
    name = f"specjax_{name}_total" if kind == "counter" else f"specjax_{name}"
    pairs = [("", values)] if isinstance(values, int | float) else values
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"] + [
        f"{name}{labels} {value:g}" if isinstance(value, float) else f"{name}{labels} {value}"
        for labels, value in pairs
    ]
