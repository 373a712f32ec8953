"""What the programs of benchmarks/ are given: wrong words end them with a sentence."""

import argparse
from pathlib import Path

import pytest
from benchmarks.arguments import count, counts, keep_to, learning_rates, names, shapes

TINY = {"big": False, "tiny": True}


def test_names_are_read_and_unknown_ones_named():
    assert names(TINY, "shape")("tiny,big") == ["tiny", "big"]
    for wrong, told in {"tiny,1x2": "1x2", "": "nothing", "tiny,": "nothing"}.items():
        with pytest.raises(argparse.ArgumentTypeError, match=f"{told} is no shape: name some of"):
            names(TINY, "shape")(wrong)


def test_counts_begin_at_one():
    assert counts("1,20") == [1, 20]
    for wrong in ("0", "-1", "two", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no number of at least 1"):
            count(wrong)


def test_learning_rates_stay_as_written_and_are_above_zero():
    assert learning_rates("1e-5,0.5") == ["1e-5", "0.5"]
    for wrong in ("0", "-1e-3", "nan", "inf", "fast", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no learning rate above 0"):
            learning_rates(wrong)


def test_a_shape_without_its_model_ends_the_program(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    assert shapes(parser, None, TINY, None) == ["tiny"]
    for asked, model, told in [
        (["big"], None, "shape big needs --model"),
        (None, tmp_path, "is no folder with config.json"),
    ]:
        with pytest.raises(SystemExit) as ended:
            shapes(parser, asked, TINY, model)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert shapes(parser, None, TINY, tmp_path) == ["big", "tiny"]
    assert shapes(parser, ["big"], TINY, tmp_path) == ["big"]


def test_a_folder_keeps_to_the_arguments_of_its_first_results(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    out = tmp_path / "new" / "out"

    def call(**own):
        keep_to(parser, argparse.Namespace(out=out, seeds=3, **own), "model", "seconds")

    call(model=Path("wrong"), seconds=60.0)
    call(model=Path("m"), seconds=60.0)  # no result depends on the first call
    (out / "sub").mkdir()
    (out / "sub" / "tba-0.json").write_text("{}")
    call(model=Path("m").resolve(), seconds=60.0)
    with pytest.raises(SystemExit) as ended:
        call(model=Path("m"), seconds=30.0)
    assert ended.value.code == 2
    assert "has results of --seconds 60.0, not 30.0: name another" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["arguments.json", "sub"]
