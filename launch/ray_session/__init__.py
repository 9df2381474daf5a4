"""Connects a run to Ray: to a running cluster, or to a private Ray that exists for this run only."""
