"""Thin adapters to trainers that people already use. Each module needs the library it is named after."""
