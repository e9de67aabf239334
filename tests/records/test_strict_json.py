"""What other programs read is JSON in the strict sense, and errors of a disk name the file."""

import io
import json
import math
from pathlib import Path

import pytest

from autotune.cli.output import print_json
from autotune.records.run_dir import named_errors


def test_a_document_for_others_has_null_in_place_of_infinities():
    out = io.StringIO()
    print_json({"max_error": math.inf, "front": [{"high": math.nan, "low": 0.5}]}, out)
    document = json.loads(out.getvalue(), parse_constant=pytest.fail)
    assert document == {"max_error": None, "front": [{"high": None, "low": 0.5}]}


def test_an_error_of_a_write_names_the_file(tmp_path: Path):
    with pytest.raises(OSError, match="No space") as caught, named_errors(tmp_path / "trials.jsonl"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "trials.jsonl")
