"""A run: learn from a stream, then train and test a classifier on few labels."""

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path
from time import process_time
from typing import Any

import torch

from streamclr.answers.answers import deliveries_of
from streamclr.base.errors import QuietExit, UserError
from streamclr.compute.ranks import join
from streamclr.encoders.projection import ContrastiveModel
from streamclr.labelling.candidates import open_candidates
from streamclr.learner import Learner
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory, open_directory
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan
from streamclr.runs.assemble import public_model
from streamclr.runs.dashboard import Dashboard
from streamclr.runs.evaluation import evaluate_run
from streamclr.runs.harm import compare_encoders
from streamclr.runs.loop import learn_stream
from streamclr.runs.prepare import own_part, prepare
from streamclr.streams.account import Account
from streamclr.streams.stream import Stream


def run(options: RunOptions, stage_two: bool = True, dashboard: Dashboard | None = None) -> tuple[Path, dict[str, Any]]:
    """Learn, then evaluate; under torchrun, this rank's part of it. Returns the run directory and the results.

    stage_two: whether to evaluate.
    dashboard: of --serve, which the caller closes; default: one that ends with the run.
    """
    with join(options.device, options.norm_over) as ranks:
        with ranks.together():
            plan, stream, learner = prepare(options, ranks)
        with closing(open_directory(plan, ranks)) as directory, ExitStack() as stack:
            if options.label_budget is None:
                plan = with_room_for_questions(plan, stream, directory)
            if plan.serve and not ranks.index:
                dashboard = dashboard or stack.enter_context(closing(Dashboard()))
                dashboard.open(directory.path, plan.host, plan.port)
            learner.join(ranks)
            cpu_seconds = process_time()  # of this process: a run that goes on counts them from there
            try:
                seconds = learn_stream(own_part(plan, ranks), learner, stream, directory)
                if not learner.buffer.n_seen and ranks.n == 1:
                    why = str(stream.account) if stream.account.received else "there was no image in it"
                    raise UserError(f"{options.source} has ended, and nothing was learned: {why}")
            except (UserError, QuietExit):
                directory.remove_if_empty()
                raise
            cpu_seconds = process_time() - cpu_seconds
            parts = ranks.collect((learner.buffer.n_seen, stream.account))
            learner.leave()
            directory.save_buffer(learner, stream)
            if ranks.index:
                raise QuietExit(0)  # rank 0 alone evaluates
            model, harm = used_model(plan, learner, directory)
            directory.save_model(model)
            results = {
                "images": sum(n_seen for n_seen, _ in parts),
                "steps": learner.n_steps,
                "seconds_learning": seconds,
                "cpu_seconds_learning": cpu_seconds,
                **accounts_of([account for _, account in parts]),
                **harm,
                **(evaluate_run(plan, model, stream, directory) if stage_two else {"labels": {}}),
            }
            if plan.predict:
                served = Versions(directory).look()
                results |= {"predictions": stream.account.predicted, "served": served.about() if served else None}
            if plan.to:
                results |= {"answers": deliveries_of(directory.path / "answers")}
            directory.save_results(results)
            return directory.path, results


def with_room_for_questions(plan: RunPlan, stream: Stream, directory: RunDirectory) -> RunPlan:
    """Nobody has asked for questions, so a run goes on without where the disk has no room for them."""
    try:
        candidates = open_candidates(directory.path, plan, stream.epoch)
    except UserError as error:
        directory.tell(f"no questions to a person: {error}", step=0)
        return dataclasses.replace(plan, label_budget=None)
    if candidates:
        candidates.close()
    return plan


def used_model(plan: RunPlan, learner: Learner, directory: RunDirectory) -> tuple[ContrastiveModel, dict[str, Any]]:
    """What the run's encoder is from now on: the adapted one or, if that does harm, the public one that it began with.

    The adapted one stays in the last checkpoint. Returns the model and what to say of it in results.json.
    """
    public = public_model(plan)
    if public is None or not len(learner.buffer):
        return learner.model, {}
    images, neighbours = learner.buffer.pairs(torch.arange(len(learner.buffer)))
    found = compare_encoders(public, learner.model, images, neighbours, plan.seed)
    if found["used"] == "adapted":
        return learner.model, {"encoder": found}
    directory.tell(f"the adapted encoder is not used, the public one is: {found['why']}", step=learner.n_steps)
    return public, {"encoder": found}


def accounts_of(ranks: list[Account]) -> dict[str, Any]:
    """The account of all frames and, under torchrun, that of each rank."""
    total = Account()
    for account in ranks:
        total.add(account)
    each = [account.state_dict() for account in ranks]
    return {"account": total.state_dict()} | ({"accounts_of_ranks": each} if len(each) > 1 else {})
