"""Jobs that are started while others run: every answer reaches who waits for it."""

from testing.runner import Runner


def test_an_answer_to_another_job_is_kept() -> None:
    runner = Runner.__new__(Runner)  # without a server
    runner._unclaimed = {}
    answers = iter([{"id": 1}, {"id": 3}, {"id": 2}])
    runner._read = lambda limit_s: next(answers)  # type: ignore[method-assign]
    assert runner._answer_for([2], 0.0) == {"id": 2}
    assert runner._answer_for([1, 3], 0.0) == {"id": 1}
    assert runner._answer_for([3], 0.0) == {"id": 3}
