"""The command line: parsing and printing only, one short module per verb."""
