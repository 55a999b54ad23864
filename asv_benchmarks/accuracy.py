"""Measure the test accuracy of recipes on graphs over seeds, also on sets that they do not name.

Run it as ``python accuracy.py gcn-citeseer --seeds 10``; ``gin-proteins`` needs ``--data`` with the
folder of a set in DGCNN's text format. Prints a line of JSON for each seed and one for all.
"""

import argparse
import json
import tempfile
import time

import numpy as np

from rtxarr import geom, recipes
from rtxarr.data import load_citeseer
from rtxarr.recipes._recipe import Recipe


def changed(name, **own):
    """Give a recipe without its pictures, and with what is in ``own`` in place of its own."""
    kind = recipes.load(name)
    return type(kind.__name__, (kind,), {"finish": lambda self, folder: [], "files": (), **own})


def main():
    known = {
        "gcn-cora": lambda data: changed("gcn-cora"),
        "gat-cora": lambda data: changed("gat-cora"),
        "gin-mutag": lambda data: changed("gin-mutag"),
        "link-citeseer": lambda data: changed("link-citeseer"),
        "gcn-citeseer": lambda data: changed("gcn-cora", read=staticmethod(load_citeseer)),
        # On Citeseer the validation loss falls on after its accuracy: take the epoch by accuracy.
        "gat-citeseer": lambda data: changed(
            "gat-cora", read=staticmethod(load_citeseer), rank=Recipe.rank
        ),
        "gin-proteins": lambda data: changed(
            "gin-mutag", read=staticmethod(lambda: geom.read_dgcnn(data))
        ),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=known)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--data")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    kind = known[given.name](given.data)
    config = kind.Config(**recipes.parse_settings(kind.Config, given.set))
    found = []
    for seed in range(given.first, given.first + given.seeds):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            result = recipes.run(kind, config, out=folder, seed=seed)
        found.append(result.test_metric)
        seconds = round(time.perf_counter() - start, 1)
        print(json.dumps({"seed": seed, "test": found[-1], "seconds": seconds}), flush=True)
    spread = {"mean": np.mean(found), "std": np.std(found), "min": min(found), "max": max(found)}
    print(json.dumps({"name": given.name, "seeds": given.seeds, **spread}))


if __name__ == "__main__":
    main()
