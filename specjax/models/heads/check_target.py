"""`check_target`: refuses a head that was trained for another target."""

from specjax.file_io import quote

__all__ = ["check_target"]


def check_target(
    kind: str,
    *,
    trained: tuple[int, int],
    target: tuple[int, int],
    taps: tuple[int, ...],
    num_layers: int,
) -> None:
    """Refuses a head whose sizes or taps are not those of the target.

    Args:
      kind: of the head, for people.
      trained: hidden size and number of tokens of the target that it was trained for.
      target: those of the target.
      taps: of the head.
      num_layers: of the target.

    Raises:
      ValueError: if the head reads states of another size, tokens of another vocabulary, or after
        layers that the target has not.
    """
    cure = "use a head that was trained for this target."
    if trained[0] != target[0]:
        raise ValueError(
            f"the {kind} head reads hidden states of size {trained[0]} and the target's have "
            f"{target[0]}; {cure}"
        )
    if trained[1] != target[1]:
        raise ValueError(
            f"the {kind} head is for {trained[1]} tokens and the target has {target[1]}; {cure}"
        )
    if not taps or min(taps) < 0 or max(taps) > num_layers:
        raise ValueError(
            f"the {kind} head reads states after layers {quote(list(taps))} and the target "
            f"has {num_layers} layers; {cure}"
        )
