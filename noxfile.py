"""The tests on every supported torch, with the triton that belongs to it, in environments of their own.

    nox -s tests-2.11                          the whole suite, on every Python that is there
    nox -s tests-2.11 -- tests/test_store.py   a part of it
    nox -s quick-2.11 --python 3.11            what a torch release can break: code generation, export, integrations

pip takes the CPU build of torch where it finds one, and the CUDA build, several GB, elsewhere: the tests run on both.
"""

from __future__ import annotations

import nox

nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False
nox.options.sessions = []

PYTHONS = ["3.11", "3.12"]
TRITON = {"2.11.0": "3.6.0", "2.13.0": "3.7.1", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
"""triton for torch; CPU builds of torch pin none."""
QUICK = "contract export explain faults package sharding store testing transformers".split()


def run(session: nox.Session, torch: str, *selection: str) -> None:
    session.install(f"torch=={torch}", f"triton=={TRITON[torch]}")
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-n", "auto", "--dist", "worksteal", *(session.posargs or selection))


for version in TRITON:
    short = version.rpartition(".")[0]

    @nox.session(name=f"tests-{short}", python=PYTHONS)
    def tests(session: nox.Session, version: str = version) -> None:
        """The whole suite, or what is named behind --."""
        run(session, version)

    @nox.session(name=f"quick-{short}", python=PYTHONS)
    def quick(session: nox.Session, version: str = version) -> None:
        """The files that a release of torch or triton can break."""
        run(session, version, *(f"tests/test_{name}.py" for name in QUICK))
