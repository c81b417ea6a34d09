"""Version of specjax: its only place, which `pyproject.toml` reads from this file."""

__all__: list[str] = []

__version__ = "0.2.0"
