"""What a batcher has done since it was made."""

from dataclasses import dataclass

from joynexus.queues.running_batch import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class BatcherStats:
    """What a batcher has done since it was made."""

    batches: int
    asides: int
    """Of these, run in the middle of another one, which was put aside for them."""
    requests: int
    """That were run, failed ones included."""
    failed: int
    """Answered with an error by the engine."""
    cancelled: int
    """Callers that gave up before their request was run."""
    refused: int
    """Turned away because too many rows waited."""
    mean_requests: float
    """Per batch."""
    mean_tenants: float
    """Per batch."""
    mean_rows: float
    """Per batch."""
    mean_wait_s: float
    """From a request's arrival to the start of its batch."""
    mean_run_s: float
    """Of a batch in the engine."""
    no_data_s: float
    """In which the engine had nothing to do."""
    waiting_for_group_s: float
    """In which requests waited for company though the engine was free."""
    queued_requests: int
    """Now."""
    queued_rows: int
    """Now."""


class BatchBook:
    """Sums up what a batcher does."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.refused = 0
        self.no_data_s = 0.0
        self.group_s = 0.0
        self._sums = dict.fromkeys(("batches", "asides", "requests", "failed", "tenants", "rows"), 0)
        self._wait_s = 0.0
        self._run_s = 0.0

    def note(self, run: Run, *, is_aside: bool) -> None:
        """Book a batch that was run."""
        sums = self._sums
        sums["batches"] += 1
        sums["asides"] += is_aside
        sums["requests"] += len(run.batch)
        sums["failed"] += sum(isinstance(answer, Exception) for answer in run.answers)
        sums["tenants"] += len({each.tenant for each in run.batch})
        sums["rows"] += run.rows
        self._wait_s += sum(run.started - each.queued_at for each in run.batch)
        self._run_s += run.seconds

    def stats(self, *, queued_requests: int, queued_rows: int) -> BatcherStats:
        """Describe what was done so far, and what waits now."""
        sums = self._sums
        batches, requests = max(1, sums["batches"]), max(1, sums["requests"])
        return BatcherStats(
            batches=sums["batches"],
            asides=sums["asides"],
            requests=sums["requests"],
            failed=sums["failed"],
            cancelled=self.cancelled,
            refused=self.refused,
            mean_requests=sums["requests"] / batches,
            mean_tenants=sums["tenants"] / batches,
            mean_rows=sums["rows"] / batches,
            mean_wait_s=self._wait_s / requests,
            mean_run_s=self._run_s / batches,
            no_data_s=self.no_data_s,
            waiting_for_group_s=self.group_s,
            queued_requests=queued_requests,
            queued_rows=queued_rows,
        )
