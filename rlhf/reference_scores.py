"""Score the reference once for all pairs, before training, and keep the scores on disk for the next run."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.config import BatchConfig
from rlhf.fitting import Site
from rlhf.models.packing import Layout, pack, response_logps
from rlhf.models.precision import computing_in
from rlhf.models.reference_cache import ReferenceScores, Scores
from rlhf.models.roles import Reference
from rlhf.progress import progress
from rlhf.records import TokenRun
from rlhf.step_plan import evaluation_batches

FOLDER = "reference_scores"


def precomputed_scores(reference: Reference, runs: Sequence[TokenRun], *, fingerprint: str, batch: BatchConfig, layout: Layout,
                       site: Site) -> dict[str, Scores]:
    """Reference log-probs by record id, from the cache of the run folder where they are known, else computed and added to it.

    `fingerprint` is the reference's. Evaluation mode, no gradients, no random numbers; the cache depends on neither layout nor batch.
    """
    cache = ReferenceScores(site.folder.parent / FOLDER, fingerprint=fingerprint, dtype=site.model.dtype)
    known = sum(scores is not None for scores in cache.lookup(runs))
    site.console.print(f"reference scores: {known} of {len(runs)} rows are in {cache.folder}")
    with progress(site.console, "reference scores", len(runs), done=known) as bar, reference.scoring() as module:
        device = next(module.parameters()).device

        def score(part: Sequence[TokenRun]) -> list[Scores]:
            scores: list[Scores] = [()] * len(part)
            for rows in evaluation_batches(part, batch, packed=layout == "packed", world_size=1, rank=0):
                packed = pack([part[row] for row in rows.rows], layout=layout).to(device)
                with computing_in(site.model.dtype, device):
                    values = iter(response_logps(module, packed).logps.tolist())
                for row in rows.rows:
                    scores[row] = tuple(next(values) for _ in part[row].responses)
                bar.advance(len(rows.rows))
            return scores

        return {run.id: found for run, found in zip(runs, cache.complete(runs, score), strict=True)}
