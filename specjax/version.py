"""Version of specjax: its only place, which `pyproject.toml` reads from this file."""

__version__ = "0.2.0"
