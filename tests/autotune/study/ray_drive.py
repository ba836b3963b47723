"""A driver on a Ray cluster, as a process of its own: ``ray_drive.py SPACE.yaml STUDY_FOLDER NUM_TRIALS ADDRESS
FAKE_TRAINER_ARGUMENTS...``."""

import sys
from pathlib import Path

from autotune.space.grammar import load_space
from autotune.study.driver import Driver
from autotune.study.ray_pool import open_ray
from autotune.study.study import Study
from tests.autotune.study.conftest import FAKE_TRAINER, Log


def main() -> None:
    space_file, name, num_trials, address, *arguments = sys.argv[1:]
    folder = Path(name)
    space, enumeration = load_space(space_file)
    command = [sys.executable, FAKE_TRAINER, *arguments]
    with open_ray(address, space.cluster, folder, num_devices=1, num_workers=2, command=lambda _: command) as executor:
        study = Study.create_or_open(folder, space, enumeration, num_trials=int(num_trials))
        Driver(study, executor, Log(), 2).run()
        study.close()


if __name__ == "__main__":
    main()
