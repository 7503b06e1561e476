"""Names of the splits of a dataset, in a folder and on the hub."""

from __future__ import annotations

from collections.abc import Collection

SPLITS = {
    "train": (("train",),),
    "dev": (("dev", "validation", "valid", "val", "eval"), ("test",)),
    "test": (("test",),),
    "dev, not test": (("dev", "validation", "valid", "val", "eval"),),
}
"""Split of a run -> groups of split names. A group applies only if the dataset has no split of an earlier group."""


class MissingSplitError(ValueError):
    """Error about a split that an existing dataset lacks, or that `dev_ratio` leaves empty."""


def choose_split(split: str, names: Collection[str], place: str) -> str:
    """Return the name under which a dataset has a split.

    Args:
        split: "train", "dev" or "test".
        names: names of the splits of the dataset.
        place: the dataset, for the error message.

    Raises:
        ValueError: the dataset lacks the split, or several splits of the dataset match.
    """
    for group in SPLITS[split]:
        found = [name for name in group if name in names]
        if len(found) > 1:
            raise ValueError(
                f"{place}: more than one eval split: {' and '.join(found)}; set eval_dataset_path to the "
                "file of one split, or keep one"
            )
        if found:
            return found[0]
    others = ", ".join(name for group in SPLITS[split] for name in group if name != split)
    accepted = f" (also accepted: {others})" if others else ""
    raise MissingSplitError(f"{place}: no {split!r} split{accepted}; the dataset has {', '.join(names) or 'none'}")
