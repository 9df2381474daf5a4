"""How worker processes start: their environment, imports, ports and network, and the fork servers."""
