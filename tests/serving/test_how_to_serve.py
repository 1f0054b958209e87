"""The how-to's code runs as it stands there, and its tables are the server's."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from path_attention.serving.protocol import ChatBody, CompletionBody
from path_attention.serving.settings import Settings

TEXT = (Path(__file__).parents[2] / "docs" / "how-to-serve.md").read_text("utf-8")


def test_its_code_runs(server) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    names: dict = {}
    exec(code.replace("http://127.0.0.1:8000", server[0]), names)
    assert names["answer"].usage.completion_tokens <= 40 and isinstance(names["text"], str)
    names["client"].close()


def test_it_names_every_field_and_limit() -> None:
    told = set(re.findall(r"`([a-z_]+)", TEXT))
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert fields <= told, fields - told
    options = set(re.findall(r"--([a-z-]+)", TEXT))
    named = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
    missing = named - options - {"model-name", "api-key", "graphs"}
    assert not missing and "no-graphs" in options


def test_its_limits_are_the_settings() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([\d,]+)( [KM]iB)?", TEXT, re.M)
    for name, value, unit in rows:
        default = getattr(Settings(), name.replace("-", "_"))
        size = {"": 1, " KiB": 2**10, " MiB": 2**20}[unit]
        assert default == int(value.replace(",", "")) * size, name
    assert len(rows) >= 9
