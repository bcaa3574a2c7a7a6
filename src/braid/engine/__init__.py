"""What runs a schedule: it reads the ops of its rank, and adds none of its own."""
