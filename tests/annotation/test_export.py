"""Verdicts to records: what becomes of every task, pair and verdict; on small cases by hand, and on the votes of public data sets."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from exported_projects import PANDALM, exported, mt_bench, pandalm, rows_of, squality, task, verdict, votes
from hypothesis import example, given
from hypothesis import strategies as st

from annotation.export import Export, ExportSettings
from annotation.tasks import Candidates, make_task
from annotation.verdicts import Verdict
from rlhf.errors import ConfigError, DataError
from rlhf.records import PreferenceRecord, Prompt, RankedRecord

A, B, TIE = (1, 2), (2, 1), (1, 1)


def rankings(export: Export) -> list[RankedRecord]:
    return [*export.sides["train"].rankings, *export.sides["holdout"].rankings]


def pairs(export: Export) -> list[PreferenceRecord]:
    return [*export.sides["train"].pairs, *export.sides["holdout"].pairs]


def ties(export: Export) -> list[RankedRecord]:
    return [*export.sides["train"].ties, *export.sides["holdout"].ties]


# By hand

def test_two_of_three_give_a_preference_with_their_share_and_its_doubt() -> None:
    """Of 4 pairs of strict votes 2 agree: share (2 + 1) / (4 + 2) = 1/2, no better than coins, so that 2 : 1 is worth nothing."""
    first, second = task("p", "a", "b"), task("q", "c", "d")
    export = exported([first, second], [*votes(first, A, A, B), *votes(second, B, B, TIE)])
    assert export.strict_agreement == (2, 4)
    by_prompt = {record.prompt: record for record in pairs(export)}
    assert by_prompt[first.prompt] == PreferenceRecord(
        prompt=first.prompt, chosen="a", rejected="b", votes=3, agreement=2 / 3, smoothing=0.5, guideline="v1",
        source=f"week-48/{first.id}")
    assert (by_prompt[second.prompt].chosen, by_prompt[second.prompt].agreement) == ("d", 2 / 3)
    assert {record for ranking in rankings(export) for record in ranking.pairs()} == set(by_prompt.values())


def test_a_ranking_stays_whole_and_its_pairs_have_their_own_votes() -> None:
    """Ranks (1,1,2) twice and (1,2,3) once: A = B by two of three, A > C and B > C by all. Strict votes: 6 pairs of them, all agree."""
    item = task("p", "a", "b", "c")
    export = exported([item], votes(item, (1, 1, 2), (1, 1, 2), (1, 2, 3)))
    ranking, = rankings(export)
    assert (ranking.responses, ranking.ranks, ranking.votes, ranking.agreement) == (("a", "b", "c"), (1, 1, 2), 3, 8 / 9)
    assert {(record.chosen, record.rejected, record.votes, record.agreement) for record in pairs(export)} == \
        {("a", "c", 3, 1.0), ("b", "c", 3, 1.0)}
    assert {record.chosen for record in ranking.pairs()} == {"a", "b"}
    assert export.pairs == {"strict": 2, "tie": 1, "open": 0, "contradiction": 0, "too_few_votes": 0, "repeated": 0, "tasks_disagree": 0}
    smoothings = {record.smoothing for record in pairs(export)}
    assert smoothings == {ranking.smoothing}
    # share 7/8; q = (1 + sqrt(3/4)) / 2 = 0.9330; three votes for, none against: 1 / (1 + (q / (1 - q))^3)
    assert smoothings.pop() == pytest.approx(1 / (1 + (0.9330127 / 0.0669873) ** 3), rel=1e-5)


def test_each_kind_of_task_is_counted_and_kept_where_it_belongs() -> None:
    decided, equal, split, cycle, floating, early, unseen = (
        task("decided", "a", "b"), task("equal", "a", "b"), task("split", "a", "b"), task("cycle", "a", "b", "c"),
        task("floating", "a", "b", "c"), task("early", "a", "b"), task("unseen", "a", "b"))
    gold = task("gold", "a", "b", gold=(1, 2))
    export = exported([decided, equal, split, cycle, floating, early, unseen, gold], [
        *votes(decided, A, A), *votes(equal, TIE, TIE), *votes(split, A, A, B, B), *votes(cycle, (1, 2, 3), (2, 3, 1), (3, 1, 2)),
        *votes(floating, (1, 2, 3), (3, 1, 2)), *votes(early, A), *votes(gold, A, A)], min_votes=2)
    assert export.tasks == {"ranking": 1, "tie": 1, "undecided": 1, "contradiction": 1, "unplaced": 1, "too_few_votes": 1, "no_votes": 1,
                            "gold": 1}
    assert [record.prompt for record in ties(export)] == [equal.prompt]
    assert {(record.prompt, record.chosen, record.rejected) for record in pairs(export)} == \
        {(decided.prompt, "a", "b"), (floating.prompt, "b", "c")}
    assert {row["task"]: row["kind"] for row in export.disputes} == \
        {split.id: "undecided", cycle.id: "contradiction", floating.id: "unplaced", early.id: "too_few_votes"}
    assert export.pairs == {"strict": 2, "tie": 1, "open": 1 + 2, "contradiction": 3, "too_few_votes": 1 + 1, "repeated": 0,
                            "tasks_disagree": 0}
    assert {fate: count for fate, count in export.verdicts.items() if count} == {"used": 14, "gold": 2}


def test_only_standing_votes_of_those_asked_for_count() -> None:
    item = task("p", "a", "b")
    said = [verdict(item, "ann", A), verdict(item, "bob", B, guideline="v2-5e"), verdict(item, "cem", A),
            verdict(task("q", "c", "d"), "fay", A),
            Verdict(task_id=item.id, annotator="dee", kind="discarded"), Verdict(task_id=item.id, annotator="eve", kind="withdrawn")]
    assert exported([item], said, guideline="v1").verdicts == {"used": 2, "gold": 0, "discarded": 1, "withdrawn": 1, "other_annotator": 0,
                                                               "other_guideline": 1, "unknown_task": 1}
    assert exported([item], said, without=("cem", "dee")).tasks["undecided"] == 1
    assert rankings(exported([item], said, annotators=("bob",)))[0].guideline == "v2-5e"
    assert rankings(exported([item], said))[0].guideline == "v1+v2-5e"
    assert pairs(exported([item], said, guideline="v2"))[0].chosen == "b"
    with pytest.raises(ConfigError, match="no verdict is of annotator ana; there are verdicts of ann, bob, cem, dee, eve, fay"):
        exported([item], said, without=("ana",))
    with pytest.raises(ConfigError, match="no verdict was given under guideline v; there are verdicts under v1, v2-5e"):
        exported([item], said, guideline="v")


def test_of_all_rankings_each_is_kept_once_with_the_number_of_those_who_gave_it() -> None:
    item = task("p", "a", "b", "c")
    export = exported([item], votes(item, (1, 2, 3), (1, 2, 3), (1, 3, 2), (5, 5, 5)), policy="all")
    assert {(record.responses, record.ranks): (record.votes, record.agreement) for record in rankings(export)} == {
        (("a", "b", "c"), (1, 2, 3)): (2, 1.0), (("a", "c", "b"), (1, 2, 3)): (1, 1.0)}
    assert [(record.ranks, record.votes) for record in ties(export)] == [((1, 1, 1), 1)]
    assert {(record.chosen, record.rejected): record.votes for record in pairs(export)} == \
        {("a", "b"): 3, ("a", "c"): 3, ("b", "c"): 2, ("c", "b"): 1}
    assert export.tasks["ranking"] == 1 and export.pairs["strict"] == 3


def test_a_pair_that_several_tasks_show_is_one_record_unless_they_disagree() -> None:
    small, large, other = task("p", "a", "b"), task("p", "a", "b", "c"), task("q", "a", "b")
    said = [*votes(large, (1, 2, 3), (1, 2, 3), (1, 2, 3)), *votes(other, A)]
    agreeing = exported([small, large, other], [*votes(small, A), *said])
    assert [(record.votes, record.source) for record in pairs(agreeing) if record.prompt == small.prompt and record.rejected == "b"] == \
        [(3, f"week-48/{large.id}")]
    assert (agreeing.pairs["strict"], agreeing.pairs["repeated"]) == (4, 1)
    disagreeing = exported([small, large, other], [*votes(small, B), *said])
    assert {(record.prompt, record.chosen, record.rejected) for record in pairs(disagreeing)} == \
        {(small.prompt, "a", "c"), (small.prompt, "b", "c"), (other.prompt, "a", "b")}
    assert (disagreeing.pairs["strict"], disagreeing.pairs["tasks_disagree"]) == (3, 2)


def test_without_two_votes_on_a_pair_nothing_is_known_of_its_doubt() -> None:
    item = task("p", "a", "b")
    record, = pairs(exported([item], votes(item, A)))
    assert (record.smoothing, record.agreement) == (None, 1.0)


@pytest.mark.parametrize(("settings", "message"), [
    ({"policy": "unanimous", "min_votes": 1}, "a single vote always agrees with itself"),
    ({"policy": "majority", "min_votes": 0}, "must be at least 1, got 0"),
    ({"policy": "dawid-skene", "min_votes": 1, "min_posterior": 0.4}, r"must be in \[0.5, 1\), got 0.4"),
    ({"policy": "majority", "min_votes": 1, "holdout_percent": 100}, r"must be in \[0, 100\), got 100"),
    ({"policy": "majority", "min_votes": 1, "annotators": ("a",), "without": ("b",)}, "not both"),
])
def test_settings_that_cannot_be_meant_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportSettings(**settings)


def test_ranks_that_fit_no_task_are_refused() -> None:
    pair, triple = task("p", "a", "b"), task("p", "a", "b", "c")
    with pytest.raises(DataError, match="has 2 responses, but ann0 gave 3 ranks"):
        exported([pair], [replace(votes(triple, (1, 2, 3))[0], task_id=pair.id)])


# Public votes

def test_pandalm_by_the_counts_that_come_with_it() -> None:
    """879 rows are unanimous, 85 of them ties; 120 are two to one; none has three different votes."""
    tasks, verdicts = pandalm()
    counts = exported(tasks, verdicts, "unanimous", min_votes=2).tasks
    assert (counts["ranking"], counts["tie"], counts["undecided"]) == (879 - 85, 85, 120)
    counts = exported(tasks, verdicts).tasks
    assert (counts["ranking"] + counts["tie"], counts["undecided"]) == (999, 0)


def test_pandalm_is_judged_as_the_reader_of_its_file_judges_it() -> None:
    """rlhf.data takes the majority of three on its own; rows that it refuses (empty, not text, the same again) are left out here."""
    from rlhf.data.comparisons import read_pandalm
    from rlhf.data.drafts import Repairer, finish
    from rlhf.data.rejects import RowError

    theirs, tasks, verdicts = {}, {}, []
    for row in rows_of("pandalm_testset/testset-v1.json.gz"):
        try:
            record = finish(next(iter(read_pandalm(row))), Repairer(()), "")
        except RowError:
            continue
        item = make_task(Candidates(prompt=record.prompt, responses=(row["response1"], row["response2"])), seed=0)
        if item.id not in tasks:
            tasks[item.id] = item
            theirs[record.content_id] = (record.votes, record.agreement)
            verdicts += [verdict(item, column, PANDALM[row[column]]) for column in ("annotator1", "annotator2", "annotator3")]
    export = exported(tasks.values(), verdicts)
    assert {record.content_id: (record.votes, record.agreement) for record in (*pairs(export), *ties(export))} == theirs
    assert len(theirs) > 800


def test_mt_bench_by_a_loop_of_its_own() -> None:
    counted: defaultdict[tuple[object, ...], dict[str, str]] = defaultdict(dict)
    for row in rows_of("mtbench_votes/human.jsonl.gz"):
        winner = row[row["winner"]] if row["winner"] != "tie" else "tie"
        counted[row["question_id"], row["turn"], frozenset((row["model_a"], row["model_b"]))].setdefault(row["judge"], winner)
    expected: Counter[str] = Counter()
    for judges in counted.values():
        (choice, most), = Counter(judges.values()).most_common(1)
        decided = "tie" if choice == "tie" else "ranking"
        expected["too_few_votes" if len(judges) < 2 else "undecided" if 2 * most <= len(judges) else decided] += 1
    assert sum(expected.values()) == 1814
    tasks, verdicts = mt_bench()
    found = exported(tasks, verdicts, min_votes=2).tasks
    assert {kind: count for kind, count in found.items() if count} == dict(expected)


def test_squality_by_the_disagreement_that_comes_with_it() -> None:
    """No tied ranks, three workers: majority decides all 300 pairs, and no question has a cycle; 58 pairs have opposed votes."""
    tasks, verdicts = squality()
    found = exported(tasks, verdicts)
    assert (found.tasks["ranking"], found.pairs["strict"]) == (100, 300)
    assert sum(record.agreement < 1 for record in pairs(found)) == 58
    unanimous = exported(tasks, verdicts, "unanimous", min_votes=3)
    assert (unanimous.pairs["strict"], unanimous.pairs["open"]) == (300 - 58, 58)


# Properties

PROJECTS = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 4), st.booleans(),
                              st.lists(st.lists(st.integers(1, 3), min_size=4, max_size=4), max_size=4)), max_size=6)
POLICIES = st.sampled_from(["majority", "unanimous", "all"])


def project(drawn):
    """Tasks over four prompts, some of them gold, whose responses overlap; and the votes on them."""
    tasks, verdicts = {}, []
    for prompt, count, gold, ballots in drawn:
        item = task(f"prompt {prompt}", *"abcd"[:count], gold=range(1, count + 1) if gold else ())
        if item.id not in tasks:
            tasks[item.id] = item
            verdicts += votes(item, *(ballot[:count] for ballot in ballots))
    return list(tasks.values()), verdicts


@given(PROJECTS, POLICIES, st.integers(2, 3))
def test_every_task_pair_and_verdict_is_counted_once(drawn, policy, min_votes) -> None:
    tasks, verdicts = project(drawn)
    export = exported(tasks, verdicts, policy, min_votes=min_votes)
    assert sum(export.tasks.values()) == len(tasks)
    assert sum(export.pairs.values()) == sum(len(item.responses) * (len(item.responses) - 1) // 2 for item in tasks if not item.gold)
    assert sum(export.verdicts.values()) == len(verdicts)
    judged = export.tasks["ranking"] + export.tasks["tie"]
    assert len(export.disputes) == len(tasks) - judged - export.tasks["no_votes"] - export.tasks["gold"]
    if policy != "all":
        assert (len(rankings(export)), len(ties(export))) == (export.tasks["ranking"], export.tasks["tie"])
        assert len(pairs(export)) == export.pairs["strict"]
    assert not {record.source for record in (*rankings(export), *pairs(export), *ties(export))} & \
        {f"week-48/{item.id}" for item in tasks if item.gold}


@given(PROJECTS, POLICIES, st.permutations(range(4)))
@example([(0, 4, False, [[1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 2, 1]])], "majority", [0, 1, 2, 3])      # a mean that depends on the order
def test_records_do_not_know_who_voted_nor_how_the_responses_were_listed(drawn, policy, names) -> None:
    tasks, verdicts = project(drawn)
    others = [make_task(Candidates(prompt=item.prompt, responses=item.responses[::-1], gold=item.gold[::-1]), seed=5) for item in tasks]
    turned = [replace(said, annotator=f"ann{names[int(said.annotator[-1])]}", ranks=said.ranks[::-1]) for said in verdicts]
    export, other = exported(tasks, verdicts, policy, min_votes=2), exported(others[::-1], turned[::-1], policy, min_votes=2)
    assert other.sides == export.sides
    assert (other.tasks, other.pairs) == (export.tasks, export.pairs)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8, unique=True), st.integers(0, 99), st.integers(1, 7))
def test_a_prompt_stays_on_its_side_in_every_later_export(prompts, percent, later) -> None:
    tasks = [task(prompt, "a", "b", *(["c"] if number % 2 else [])) for number, prompt in enumerate(prompts)]
    verdicts = [said for item in tasks for said in votes(item, [2, 1, 1][:len(item.responses)])]
    ready = {item.id for item in tasks[:later]}
    first = exported(tasks[:later], [said for said in verdicts if said.task_id in ready], holdout_percent=percent)
    second = exported([*tasks, task(prompts[0], "y", "z")], verdicts, "all", holdout_percent=percent)
    sides = {side: {record.prompt for record in (*second.sides[side].rankings, *second.sides[side].pairs)} for side in ("train", "holdout")}
    assert not sides["train"] & sides["holdout"]
    for side in ("train", "holdout"):
        assert {record.prompt for record in first.sides[side].rankings} <= sides[side]
    assert Prompt.of_text(prompts[0]) in sides["train"] | sides["holdout"]
