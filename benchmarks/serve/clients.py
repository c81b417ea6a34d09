"""Clients that stream from a server, each a socket; a process of its own, without JAX.

python -m benchmarks.serve.clients PORT NUM_CLIENTS BODY

All send the body at once. It prints a line of JSON: for each client the seconds to the first event
and to the last byte, and the tokens that the server counted.
"""

import asyncio
import json
import re
import sys
import time

_COUNT = re.compile(rb'"completion_tokens":(\d+)')


def request_of(body: bytes, path: str = "/v1/completions") -> bytes:
    """A request of HTTP."""
    lines = [f"POST {path} HTTP/1.1", "Host: a", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def read_stream(port: int, body: bytes, start: float) -> tuple[float, float, int, int]:
    """Seconds to the first event and to the end, tokens, and reads of the socket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(request_of(body))
    first, data, num_reads = 0.0, b"", 0
    while chunk := await reader.read(2**16):
        data, num_reads = (data + chunk)[-4096:], num_reads + 1
        if not first and b"data: " in data:
            first = time.perf_counter() - start
    writer.close()
    if b"[DONE]" not in data:
        sys.exit(f"a stream ended without its end: {data[-500:]!r}")
    counts = _COUNT.findall(data)
    return first, time.perf_counter() - start, int(counts[-1]), num_reads


async def main(port: int, num_clients: int, body: bytes) -> list[tuple[float, float, int, int]]:
    start = time.perf_counter()
    streams = (read_stream(port, body, start) for _ in range(num_clients))
    return list(await asyncio.gather(*streams))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()))))
