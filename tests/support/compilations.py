"""Counts what the backend compiles, eager operations among it."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
    """Yields a list that fills with the names of the programs that are compiled."""
    found = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
