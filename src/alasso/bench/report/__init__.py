"""Result files in; figures, tables and one HTML page out. Only the probe, which needs a network, ever trains one."""
