"""The groups that the prompt source puts out: ids, order, lengths, resume."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.stages.errors import ConfigError, DataError
from rollstream.stages.prompts import Prompts
from rollstream.stages.schema import Prompted, validate

#: Tokens that the template puts around a user message: one each for role, end and the answer's role.
WRAPPING = 3


@pytest.fixture
def prompts(tmp_path: Path, tiny_tokenizer_dir: Path):
    """Makes Prompts from texts."""

    def make(texts: list[Any], **settings: Any) -> Prompts:
        path = tmp_path / "rows.jsonl"
        rows = [json.dumps({"prompt": text, "answer": i}) + "\n" for i, text in enumerate(texts)]
        path.write_text("".join(rows), encoding="utf-8")
        return Prompts(Prompts.Config(**{"path": str(path), "model": str(tiny_tokenizer_dir)} | settings))

    return make


def group_ids(source: Prompts, count: int, *, skip: frozenset[int] = frozenset(), start: int = 0) -> list[str]:
    groups = itertools.islice(source.rows(skip, start), count)
    return [group.column("group_id")[0].as_py() for group in groups]


def first(source: Prompts, name: str) -> Any:
    return next(source.rows(frozenset(), 0)).column(name)[0].as_py()


def test_a_group_is_one_row_of_the_schema(prompts):
    group = next(prompts(["a"]).rows(frozenset(), 0))
    validate(group, Prompted.columns, Prompted.nullable, "prompts")
    assert group.num_rows == 1


def test_every_row_comes_once_an_epoch(prompts):
    ids = group_ids(prompts(list("abcdefghi"), epochs=2), 100)
    assert sorted(ids[:9]) == [f"r{i:06d}.e0" for i in range(1, 10)]
    assert sorted(ids[9:]) == [f"r{i:06d}.e1" for i in range(1, 10)]


def test_each_epoch_has_its_own_order(prompts):
    ids = group_ids(prompts(list("abcdefghi")), 18)
    assert [i[:7] for i in ids[:9]] != [i[:7] for i in ids[9:]]


def test_the_order_is_fixed_by_the_seed_for_ever(prompts):
    """The very order, so that a change of it is noticed: it would break the resume of older runs."""
    assert [int(i[1:7]) for i in group_ids(prompts(list("abcdef"), seed=7), 6)] == [5, 4, 3, 2, 1, 6]


def test_another_seed_gives_another_order(prompts):
    assert group_ids(prompts(list("abcdefghi")), 9) != group_ids(prompts(list("abcdefghi"), seed=1), 9)


def test_unshuffled_order_is_that_of_the_file(prompts):
    assert [i[:7] for i in group_ids(prompts(list("abc"), shuffle=False), 4)] == [
        "r000001",
        "r000002",
        "r000003",
        "r000001",
    ]


@pytest.mark.parametrize("start", [0, 3, 8, 13])
def test_a_resume_goes_on_as_if_never_stopped(prompts, start):
    """Also at the very end of an epoch (8) and inside a later one (13)."""
    whole = group_ids(prompts(list("abcdefgh"), epochs=3), 100)
    assert group_ids(prompts(list("abcdefgh"), epochs=3), 100, start=start) == whole[start:]
    assert len(whole) == 24


def test_skipped_positions_are_left_out(prompts):
    whole = group_ids(prompts(list("abcd")), 8)
    kept = group_ids(prompts(list("abcd")), 4, skip=frozenset({1, 4, 6}), start=1)
    assert kept == [whole[2], whole[3], whole[5], whole[7]]


def test_order_is_the_position_in_the_run(prompts):
    groups = itertools.islice(prompts(list("abc")).rows(frozenset({4}), 2), 3)
    assert [g.column("order")[0].as_py() for g in groups] == [2, 3, 5]


def test_rows_of_equal_text_are_different_groups(prompts):
    assert len(set(group_ids(prompts(["same", "same"], epochs=1), 10))) == 2


def test_ids_are_those_of_the_chat_template(prompts, tiny_tokenizer_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    source = prompts(["Grüße"], system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert first(source, "prompt_ids") == wanted
    assert tokenizer.decode(wanted) == first(source, "prompt")


@pytest.mark.parametrize("text", ["ab", "<s>ab"])
def test_plain_text_gets_the_tokenizers_special_tokens_once(prompts, text):
    ids = first(prompts([text], chat_template=False), "prompt_ids")
    assert len(ids) == 3
    assert ids.count(0) == 1


def test_a_chat_prompt_needs_the_template(prompts):
    source = prompts([[{"role": "user", "content": "a"}]], chat_template=False)
    assert "chat_template=False takes text only" in source.faults()[0]


def test_too_long_prompts_are_faults_with_their_lengths(prompts):
    source = prompts(["x" * (n - WRAPPING) for n in (31, 32, 33)], max_prompt_tokens=32)
    assert source.faults() == ["row 3 'prompt' has 33 tokens, the limit is 32"]


def test_too_long_prompts_are_skipped_when_asked(prompts):
    source = prompts(["x" * (n - WRAPPING) for n in (31, 32, 33)], max_prompt_tokens=32, too_long="skip", epochs=1)
    assert sorted(group_ids(source, 10)) == ["r000001.e0", "r000002.e0"]
    assert (len(source), source.longest_prompt()) == (2, 32)


def test_the_length_counts_what_the_template_adds(prompts):
    source = prompts(["x"], system="y" * 40, max_prompt_tokens=45)
    assert source.faults() == ["row 1 'prompt' has 46 tokens, the limit is 45"]


def test_the_model_sets_the_limit_and_leaves_room_for_a_token(prompts):
    assert prompts(["x" * (255 - WRAPPING)]).faults() == []
    assert "has 256 tokens, the limit is 255" in prompts(["x" * (256 - WRAPPING)]).faults()[0]
    assert "must be less than the model's" in prompts(["x"], max_prompt_tokens=256).faults()[0]


def test_no_row_left_is_a_fault_with_the_counts(prompts):
    source = prompts(["x" * 50] * 3, max_prompt_tokens=32, too_long="skip")
    assert source.faults() == ["no prompt is left: 3 rows read, 3 skipped as longer than 32 tokens"]


def test_bad_data_are_not_served_unchecked(prompts):
    with pytest.raises(DataError, match="row 1 'prompt' is null"):
        group_ids(prompts([None]), 1)


def test_a_pickled_source_goes_on_alike(prompts):
    source = prompts(list("abcdef"))
    assert source.faults() == []
    assert group_ids(pickle.loads(pickle.dumps(source)), 9) == group_ids(source, 9)


def test_data_that_changed_after_the_check_are_refused(prompts):
    source = prompts(["a"])
    source.faults()
    moved = pickle.loads(pickle.dumps(source))
    Path(source.config.path).write_text('{"prompt": "b", "answer": 0}\n')
    with pytest.raises(DataError, match="not the data that were checked"):
        group_ids(moved, 1)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle": False}, {"system": "s"}, {"chat_template": False}, {"max_prompt_tokens": 4}]
)
def test_the_fingerprint_changes_with_what_changes_the_groups(prompts, change):
    texts = ["a", "bb"]
    plain = prompts(texts, too_long="skip").fingerprint()
    assert prompts(texts, too_long="skip").fingerprint() == plain
    assert prompts(texts, too_long="skip", **change).fingerprint() != plain


def test_the_fingerprint_changes_with_the_data_and_not_with_epochs(prompts):
    assert prompts(["a"]).fingerprint() != prompts(["b"]).fingerprint()
    assert prompts(["a"]).fingerprint() == prompts(["a"], epochs=3).fingerprint()


def test_all_wrong_settings_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        Prompts.Config(path="", model="m", too_long="skp", epochs=0, system="s", chat_template=False)
    assert len(caught.value.faults) == 4
    assert "did you mean 'skip'?" in str(caught.value)


def test_importing_the_stage_loads_no_model_library():
    code = "import sys, rollstream.stages.prompts; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
