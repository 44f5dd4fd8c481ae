"""Learners whose numbers become infinite or NaN."""

import math

import torch

from streamclr import Learner


def at_steps(monkeypatch, steps, damage):
    """Damage the learner before it takes the given steps, each once."""
    left, real = list(steps), Learner.learn_many

    def learn_many(self, images, tracks=None):
        if self.n_steps + 1 in left:
            left.remove(self.n_steps + 1)
            with torch.no_grad():
                damage(self)
        return real(self, images)

    monkeypatch.setattr(Learner, "learn_many", learn_many)


def break_gradient(learner):
    """This once."""
    parameter = learner.model.head[0].weight
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * math.inf)[1])


def break_statistic(learner):
    learner.encoder.bn1.running_mean[0] = math.nan


def break_weight(learner):
    learner.model.head[-1].weight[0, 0] = math.inf


def break_moment(learner):
    learner.optimizer.means[0].view(-1)[0] = math.nan
