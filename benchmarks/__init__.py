"""What is measured, and how. `make bench` runs what needs no GPU; results/ holds figures with their machine."""
