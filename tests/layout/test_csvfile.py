import re

import pytest

from autotune.errors import ConfigError
from autotune.layout import csv_file as csvfile
from autotune.layout import lay_out


def test_what_is_written_is_read_again(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("id,lower,upper,size\nx,0,3,10\ny,2,5,7\n")
    ids, buffers = csvfile.read(source)
    csvfile.write(tmp_path / "b.csv", ids, buffers, lay_out(buffers))
    assert (tmp_path / "b.csv").read_text() == "id,lower,upper,size,offset\nx,0,3,10,0\ny,2,5,7,10\n"
    again, same = csvfile.read(tmp_path / "b.csv")
    assert again == ("x", "y")
    assert same.sizes.tolist() == [10, 7]


def test_columns_may_stand_in_any_order_among_others(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("size,alignment,id,upper,lower\n10,1,x,3,0\n")
    ids, buffers = csvfile.read(source)
    assert (ids, buffers.born.tolist(), buffers.died.tolist(), buffers.sizes.tolist()) == (("x",), [0], [3], [10])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,lower,size\n", "no column 'upper'"),
        ("", "no column 'id'"),
        ("id,lower,upper,size\nx,0,3,many\n", "a.csv:2: size is 'many'"),
        ("id,lower,upper,size\nx,0,3\n", "a.csv:2: size is None"),
        ("id,lower,upper,size\nx,0,3,1\ny,3,3,1\n", "a.csv:3: 1 bytes from 3 to 3"),
        ("id,lower,upper,size\nx,0,3,-1\n", "a.csv:2: -1 bytes"),
        ("id,lower,upper,size\nx,0,3,1\nx,3,5,1\n", "a.csv:3: id is 'x' again"),
        (200_000 * "x", "a.csv: cannot be read (field larger than field limit"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, text, said):
    source = tmp_path / "a.csv"
    source.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        csvfile.read(source)


def test_a_file_of_a_spreadsheet_begins_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfid,lower,upper,size\nx,0,3,10\n")
    assert csvfile.read(tmp_path / "a.csv")[0] == ("x",)


def test_every_offset_has_the_alignment_and_no_other(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("id,lower,upper,size\na,0,9,65600\nb,0,9,65600\n")
    for alignment, largest in ((64, 65600), (100, 65600)):
        _, buffers = csvfile.read(source, alignment=alignment)
        layout = lay_out(buffers)
        assert sorted(layout.offsets) == [0, largest]
        assert layout.bytes == 2 * largest


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        csvfile.read(tmp_path / "none.csv")


def test_a_table_without_rows_has_no_buffers(tmp_path):
    (tmp_path / "a.csv").write_text("id,lower,upper,size\n")
    assert len(csvfile.read(tmp_path / "a.csv")[1]) == 0
