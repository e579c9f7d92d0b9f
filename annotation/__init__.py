"""From annotators' clicks to preference records: ranking tasks, verdicts, agreement. Knows `rlhf.records` and nothing of training."""
