"""`ApiError`: an answer that refuses a request, in OpenAI's form."""

from collections.abc import Mapping

from specjax.file_io import shorten

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal: a sentence, the field that it is about, and a status of HTTP.

    Args:
      message: what came and what is needed.
      param: the name of the field, or None.
      status: 4xx or 5xx.
      code: a word for programs, or None.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


def error_body(error: ApiError) -> dict[str, Mapping[str, str | None]]:
    """Returns the object by which OpenAI's clients read an error.

    Example:
      >>> error_body(ApiError("n is 0.", "n"))["error"]["type"]
      'invalid_request_error'
    """
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": shorten(error.message, 1000),
            "type": _TYPES.get(error.status, default),
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: ApiError) -> dict[str, str]:
    """Returns headers that say whether to send a request again: only one for a full queue."""
    if error.status == 429:
        return {"retry-after": "1"}
    return {"x-should-retry": "false"}
