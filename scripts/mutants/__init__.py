"""Mutation testing: faults are planted in a copy of the sources, one at a time, to see whether tests notice.

    make mutants                                        the whole campaign, hours on 2 cores
    python -m scripts.mutants --only optim --jobs 1     some of it
    python -m scripts.mutants --check                   do the faults written by hand still fit the sources?

`by_hand` has faults that somebody thought of, `drawing` draws others from a seed by `operators`. `selection`
says which tests a mutant has to face, `running` runs them in copies of the repository, `report` tells what was
missed. A mutant that a test fails on is caught (killed, in the literature); one that survives all is missed.
docs/testing.md says how to read a report, and what to do about a missed one.
"""
