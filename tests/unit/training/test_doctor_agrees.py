"""`slipstream train` and `slipstream doctor` measure a drafter alike: the same texts and places, by one rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from measurement.load.workload import Asked
from measurement.pairs.check import check_pair
from measurement.pairs.figures import PairCheck
from tests.support.eagle_heads import save_easy_target
from training.request import TrainRequest
from training.run import TrainingRun
from training.samples import SampleMaker
from training.target import Target


@pytest.mark.parametrize("kind", ["draft", "eagle", pytest.param("medusa", marks=pytest.mark.slow)])
def test_a_drafter_is_right_as_often_for_the_doctor_as_in_its_report(kind: str, tmp_path: Path) -> None:
    target = save_easy_target(tmp_path / "llama")
    words = Tokenizer.from_file(str(target / "tokenizer.json"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(target / "tokenizer.json"))
    data = tmp_path / "prompts.jsonl"
    prompts = [f"t{3 * number} t{number + 7} t{100 - number}" for number in range(60)]
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    request = TrainRequest(
        kind, str(target), str(tmp_path / "out"), data=str(data), rows=4, window=32, depth=2, steps=40, rate=0.5,
        evaluate_steps=20, answers=40, answer_tokens=40, held_out=0.4, held_out_answers=16, hidden=32, feed_forward=64,
        dtype="float32",
    )  # fmt: skip
    report = TrainingRun(request).run(resume=False)
    held_out = SampleMaker(request, Target(str(target), dtype="float32"), ()).make().held_out
    asked = [
        Asked(" ".join(f"t{token}" for token in sample.tokens[: sample.first]), "all", max_tokens=40)
        for sample in held_out
    ]
    check = PairCheck(str(target), request.out, "model" if kind == "draft" else kind)
    check_pair(check, asked, 40, "float32", lambda stage: None)
    trained = report.measured
    assert check.places == trained.places and check.first is not None and trained.first is not None
    assert check.first == pytest.approx(trained.first, abs=0.02)
    assert check.by_depth[0] != pytest.approx(check.first, abs=1e-6)  # where rounds begin is no fair sample of places
