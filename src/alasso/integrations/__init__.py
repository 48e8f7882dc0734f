"""Adapters to other trainers. Each module needs the library it is named after."""
