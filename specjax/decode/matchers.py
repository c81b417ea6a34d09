"""`RowMasks`: masks of a step's logits rows, from matchers on the host.

For a loop of `init` and `step`; an engine has a `MatchedText` for each request instead.

    init(..., sampling=SamplingParams(allowed=masks.first()))
    step(..., allowed=masks.of_rows(state))   in each step

Row i is that after the first i drafted tokens. The drafts of a state are known before they are
verified, so the host can say what each row allows. Drafts are drawn without masks: the host would
have to answer between two drafted tokens.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specjax.checks import check_count
from specjax.decode.state import DecodeState

_ALL = 2**32 - 1


class Matcher(Protocol):
    """A parser of one text, which masks the next token; `llguidance.LLMatcher` is one."""

    def compute_bitmask(self) -> bytes:
        """Returns the mask of the next token: words of 32 bits, the first token in the lowest."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Reads tokens up to the first that may not follow, and returns how many it read."""

    def rollback(self, num_tokens: int) -> bool:
        """Forgets the last tokens that it read."""


class MatchedText:
    """A matcher that has read the committed tokens of one text.

    Args:
      matcher: one that has read nothing. Nothing else may use it from now on.
      vocab_size: V.
      name: of the text, for errors.
    """

    def __init__(self, matcher: Matcher, vocab_size: int, name: str) -> None:
        self._matcher, self._vocab_size, self._name = matcher, vocab_size, name

    def mask(self) -> np.ndarray:
        """Returns the mask of the next token, u32[ceil(V / 32)]."""
        words = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        width = -(-self._vocab_size // 32)
        if words.size < width:
            raise ValueError(
                f"a matcher's mask has {words.size} words; {self._vocab_size} tokens need {width}."
            )
        return words[:width]  # A mask of llguidance may have one more word.

    def read(self, tokens: list[int]) -> None:
        """Reads committed tokens, or refuses one that the mask before it does not allow.

        Some matchers do not consume the token that ends a text, so their answer is not checked.
        """
        for token in tokens:
            if not self._is_token(token) or not int(self.mask()[token // 32]) >> token % 32 & 1:
                raise ValueError(
                    f"{self._name} has token {token}, which may not follow; each init and step "
                    "needs the masks of its rows as allowed, and an exact method."
                )
            self._matcher.try_consume_tokens([token])

    def fill(self, drafted: list[int], masks: np.ndarray) -> None:
        """Writes the masks of a step's rows; the matcher reads the draft and is rolled back.

        After a token that may not follow, rows keep the mask before it. That token is rejected, so
        that these rows decide nothing.

        Args:
          drafted: the pending draft's tokens.
          masks: u32[K + 1, ceil(V / 32)], written.
        """
        masks[:] = self.mask()
        num_read = 0
        for i, token in enumerate(drafted):
            if not self._is_token(token) or not self._matcher.try_consume_tokens([token]):
                break
            num_read += 1
            masks[i + 1 :] = self.mask()
        if num_read:
            self._matcher.rollback(num_read)

    def _is_token(self, token: int) -> bool:
        return 0 <= token < self._vocab_size


def new_masks(size: int, num_rows: int, vocab_size: int) -> np.ndarray:
    """Returns masks u32[size, num_rows, ceil(V / 32)] that allow every token."""
    return np.full((size, num_rows, -(-vocab_size // 32)), _ALL, np.uint32)


class RowMasks:
    """Masks of a step's rows, from a matcher for each request.

    Row i of a request has the mask after its committed tokens and the i drafted ones after them. A
    drafted token that may not follow has probability 0 in its row, so it is rejected. The
    matchers read the drafts, and are rolled back to the committed tokens.

    Args:
      matchers: one per request, None for a request without a grammar. They have read nothing, and
        nothing else may use them from now on.
      prompt_lengths: i32[B], of the prompts given to `init`; prompts are not read.
      vocab_size: V.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> class TwoOnes:  # token 1 twice, then token 0
      ...     def __init__(self): self.read = 0
      ...     def compute_bitmask(self): return np.uint32(0b10 if self.read < 2 else 1).tobytes()
      ...     def try_consume_tokens(self, tokens): self.read += len(tokens); return len(tokens)
      ...     def rollback(self, num_tokens): self.read -= num_tokens; return True
      >>> model = markov_chain([[0.2, 0.8], [0.6, 0.4]])
      >>> masks = specjax.RowMasks([TwoOnes()], [2], vocab_size=2)
      >>> state = specjax.init(
      ...     model, None, [[0, 0]], keys=jax.random.key(0), max_new_tokens=5,
      ...     sampling=specjax.SamplingParams(allowed=masks.first()))
      >>> while not state.finish.all():
      ...     state, _ = specjax.step(model, None, state, allowed=masks.of_rows(state))
      >>> specjax.unpad(state.token_ids)
      [[0, 0, 1, 1, 0, 0, 0]]
    """

    def __init__(
        self, matchers: Sequence[Matcher | None], prompt_lengths: Any, vocab_size: int
    ) -> None:
        size = check_count("vocab_size", vocab_size, 1, "the tokens of the target")
        self._texts = [
            None if matcher is None else MatchedText(matcher, size, f"request {b}")
            for b, matcher in enumerate(matchers)
        ]
        self._num_read = np.array(prompt_lengths, np.int64)
        self._vocab_size = size
        if self._num_read.shape != (len(self._texts),):
            raise ValueError(
                f"prompt_lengths has shape {self._num_read.shape}; it needs one for each of "
                f"{len(self._texts)} matchers."
            )
        # Tokens of the last request's prompt.
        self._last_prompt = int(self._num_read[-1:].sum())

    def first(self) -> np.ndarray:
        """Returns the masks of the first generated token, u32[B, 1, ceil(V / 32)], for `init`."""
        masks = new_masks(len(self._texts), 1, self._vocab_size)
        for masks_of_text, text in zip(masks, self._texts, strict=True):
            if text is not None:
                masks_of_text[0] = text.mask()
        return masks

    def of_rows(self, state: DecodeState) -> np.ndarray:
        """Returns the masks of the rows of a state's next step, u32[B, K + 1, ceil(V / 32)].

        On a mesh, copies of the last request may pad the state; these have its masks.

        Args:
          state: from `init` or `step`, each state once and in their order.

        Raises:
          ValueError: if a committed token may not follow: it was decoded without these masks. Or if
            the state has other requests than matchers were given for.
        """
        read = (state.token_ids, state.lengths, state.finish)
        drafted = (state.draft.token_ids, state.draft.num_tokens)
        (token_ids, lengths, finish), (draft_ids, counts) = jax.device_get((read, drafted))
        size = len(self._texts)
        # Requests beyond the matchers have to be copies of the last one: the same prompt.
        prompts = token_ids[:, : self._last_prompt]
        if not 0 < size <= len(prompts) or np.any(prompts[size:] != prompts[size - 1]):
            raise ValueError(
                f"the state has {len(token_ids)} requests, and masks are of {size} matchers; it "
                "needs one for each, None for a request without a grammar."
            )
        masks = new_masks(size, draft_ids.shape[1] + 1, self._vocab_size)
        for b, text in enumerate(self._texts):
            if text is None or finish[b]:
                continue
            committed = token_ids[b, self._num_read[b] : lengths[b]].tolist()
            self._num_read[b] = lengths[b]
            text.read(committed)
            text.fill(draft_ids[b].tolist()[: max(int(counts[b]), 0)], masks[b])
        return masks[np.minimum(np.arange(len(token_ids)), size - 1)]
