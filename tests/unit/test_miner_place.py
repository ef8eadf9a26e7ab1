"""The place in the learning rate's schedule: the network's, whenever a miner joined.

``test_miner_rounds.py`` and ``test_miner_controller.py`` have what orders that place, and
``test_training_parts.py`` the rate at each place.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from distributed_training.miner.build import StartupInfo, resume_training
from tests.tools.training_world import trainer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]


def test_a_member_goes_to_the_networks_place_and_behind_it_by_its_own_steps() -> None:
    member, info = trainer(), StartupInfo(global_outer_step=4, inner_steps=200)
    member.load_weights = Mock()  # the file is of no matter here
    resume_training(member, Mock(restore=lambda: None), info, None)
    assert member.total_inner_steps == 200
    member.inner_step, member.total_inner_steps = 2, 77  # of an older checkpoint, after a roll-back
    for outer_step, steps, place in ((7, 300, 77), (4, 0, 77), (4, 300, 302)):
        member.follow_schedule(outer_step, steps)
        assert member.total_inner_steps == place
