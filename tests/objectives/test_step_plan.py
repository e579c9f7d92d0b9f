"""The step plan: every row as often as the epochs say, the same totals on every device, microbatches within their limits."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config import BatchConfig
from rlhf.errors import ConfigError
from rlhf.records import TokenRun
from rlhf.step_plan import StepPlan, StepTotals, balance, epoch_order, evaluation_batches


def rows(*lengths: int) -> list[TokenRun]:
    """Runs with a prompt of 1 token and two responses; `lengths` is the length of the first, the second has 1 token."""
    return [TokenRun(id=f"row{i}", prompt=(7,), responses=((5,) * length, (6,))) for i, length in enumerate(lengths)]


def seen(plan: StepPlan) -> Counter[int]:
    return Counter(row for step in range(plan.steps) for rank in plan.microbatches_of(step) for microbatch in rank for row in microbatch)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), per_step=st.sampled_from([2, 4, 8]), per_microbatch=st.integers(1, 2),
       epochs=st.sampled_from([0.5, 1.0, 2.5]), world=st.sampled_from([1, 2]), budget=st.sampled_from([None, 42, 90]))
def test_every_row_is_seen_as_often_as_the_epochs_say_and_within_the_limits(lengths, per_step, per_microbatch, epochs, world, budget):
    batch = BatchConfig(per_step=per_step, per_microbatch=per_microbatch, tokens_per_microbatch=budget)
    plan = StepPlan(runs=rows(*lengths), batch=batch, seed=3, epochs=epochs, max_steps=None, world_size=world)
    counts = seen(plan)
    total = sum(counts.values())
    wanted = max(1, round(epochs * len(lengths)))
    assert wanted <= total < wanted + world                               # only filled up to a multiple of the devices
    assert max(counts.values()) - min(counts[row] for row in range(len(lengths))) <= 1
    for step in range(plan.steps):
        by_rank = plan.microbatches_of(step)
        assert len({len(rank) for rank in by_rank}) == 1                  # no device waits for another
        assert len(by_rank[0]) <= plan.accumulation
        for microbatch in (m for rank in by_rank for m in rank):
            assert 1 <= len(microbatch) <= per_microbatch
            assert budget is None or sum(plan.tokens[row] for row in microbatch) <= budget
    assert plan.microbatch_count == sum(len(plan.microbatches_of(step)[0]) for step in range(plan.steps))


def test_totals_are_those_of_the_whole_step_by_hand():
    totals = StepTotals.of(rows(3, 5))
    assert totals == StepTotals(rows=2, response_tokens=3 + 1 + 5 + 1, first_response_tokens=8)


def test_rows_of_a_step_do_not_depend_on_how_it_is_cut():
    runs = rows(*range(1, 17))
    def step_rows(per_microbatch, world):
        plan = StepPlan(runs=runs, batch=BatchConfig(per_step=8, per_microbatch=per_microbatch), seed=1, epochs=2, max_steps=None,
                        world_size=world)
        return [sorted(row for rank in plan.microbatches_of(step) for m in rank for row in m) for step in range(plan.steps)]
    assert step_rows(8, 1) == step_rows(1, 1) == step_rows(2, 2) == step_rows(4, 2)


def test_epochs_have_different_orders_and_the_seed_fixes_them():
    ids = [f"r{i}" for i in range(50)]
    first, second = (epoch_order(ids, seed=0, epoch=epoch, shuffle=True) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == epoch_order(ids, seed=0, epoch=0, shuffle=True) != epoch_order(ids, seed=1, epoch=0, shuffle=True)
    assert epoch_order(ids, seed=0, epoch=5, shuffle=False) == list(range(50))


def test_balance_puts_the_longest_first_by_hand():
    # tokens 9, 7, 6, 5, 3 into 2 bins: 9 | 7 -> 9 | 7+6=13 -> 9+5=14 | 13 -> 14 | 16
    assert balance([0, 1, 2, 3, 4], [9, 7, 6, 5, 3], bins=2, most_rows=9) == [[0, 3], [1, 2, 4]]


def test_a_row_longer_than_the_budget_is_named_before_training():
    with pytest.raises(ConfigError, match=r"row row1 alone has 52 tokens"):
        StepPlan(runs=rows(3, 50), batch=BatchConfig(per_step=2, per_microbatch=2, tokens_per_microbatch=20), seed=0, epochs=1,
                 max_steps=None)


def test_a_step_that_does_not_divide_over_the_devices_is_refused():
    with pytest.raises(ConfigError, match="3 does not divide by 2"):
        StepPlan(runs=rows(1, 1, 1), batch=BatchConfig(per_step=3, per_microbatch=1), seed=0, epochs=1, max_steps=None, world_size=2)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_evaluation_gives_each_device_as_many_batches_and_counts_each_row_once(count):
    runs = rows(*range(1, count + 1))
    shares = [evaluation_batches(runs, BatchConfig(per_step=2, per_microbatch=2), packed=True, world_size=2, rank=rank) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1]) >= 1
    assert sorted(row for share in shares for batch in share if batch.counted for row in batch.rows) == list(range(count))


def test_a_plan_of_a_billion_steps_costs_what_the_steps_taken_cost():
    """max_steps may say "until I stop it"."""
    plan = StepPlan(runs=rows(2, 3, 4), batch=BatchConfig(per_step=4, per_microbatch=2), seed=0, epochs=1, max_steps=10**9)
    assert plan.steps == 10**9
    assert plan.accumulation == 2
    assert [len(plan.rows_of(step)) for step in (0, 1, 2)] == [4, 4, 4]
    assert sorted(row for step in (0, 1, 2) for row in plan.rows_of(step)) == sorted([0, 1, 2] * 4)
