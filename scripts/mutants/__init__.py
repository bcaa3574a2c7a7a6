"""Mutation testing: faults are planted in a copy of the sources, one at a time, to see whether tests notice.

    make mutants                                        everything, an hour or more on 2 cores
    python -m scripts.mutants --only optim --jobs 1     one package
    python -m scripts.mutants --check                   whether the faults written by hand apply to the sources

`by_hand` has faults written by hand, `drawing` draws others from a seed with mutation operators (`operators`).
`selection` chooses the tests of a mutant, `running` runs them in copies of the repository, `report` summarizes.
A mutant is caught (killed, in the literature) if a test fails, and missed if it survives all of them.
docs/testing.md explains how to read a report, and what to do about a missed one.
"""
