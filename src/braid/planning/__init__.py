"""Planning: turns a run and a world size into a validated `Plan`, and estimates memory and communication."""
