from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_gpt
from tests.patience import LONG_S

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--layers", "0"], "--layers"),
        (["--layers", "two"], "--layers"),
        (["--hidden", "130"], "--hidden"),
        (["--heads", "-1"], "--heads"),
        (["--seq-len", "0"], "--seq-len"),
        (["--micro-batch-size", "0"], "--micro-batch-size"),
        (["--num-microbatches", "0"], "--num-microbatches"),
        (["--steps", "0"], "--steps"),
        (["--data", "/does/not/exist"], "--data"),
        (["--data", ""], "--data"),
        (["--seed", "99999999999999999999"], "--seed"),
        (["--tp", "3"], "--tp"),
        (["--dropout", "1"], "--dropout"),
        (["--dtype", "fp8"], "--dtype"),
        (["--lr", "0"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--warmup", "-1"], "--warmup"),
        (["--clip", "-1"], "--clip"),
        (["--weight-decay", "inf"], "--weight-decay"),
        (["--checkpoint-every", "-1"], "--checkpoint-every"),
        (["--lay", "2"], "--lay"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_flags_are_named_and_exit_with_2(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = train_gpt.main(flags)
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    told = capsys.readouterr()
    last = told.err.strip().splitlines()[-1]
    assert code == 2 and named in last and told.out == ""


@pytest.mark.parametrize(("flags", "code"), [(["--help"], 0), (["--hidden", "1"], 2)])
def test_help_and_mistakes_import_no_torch(flags: list[str], code: int) -> None:
    script = (
        "import sys\nfrom examples.train_gpt import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as e: code = e.code\n"
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *flags], cwd=ROOT, capture_output=True, timeout=LONG_S
    )
    assert done.returncode == code, done.stderr.decode()


def test_defaults_fit_together() -> None:
    gpt, corpus = train_gpt.check(train_gpt.parser().parse_args([]))
    assert (gpt.layers, gpt.hidden, gpt.heads, gpt.seq_len, gpt.micro_batch_size) == (
        4,
        128,
        4,
        128,
        4,
    )
    assert len(corpus) > 1_000_000
