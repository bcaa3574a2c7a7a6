"""A run worked out for a number of ranks: checked, scheduled, proved; and what it will hold and send."""
