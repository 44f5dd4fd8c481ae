"""Asking a person: candidates, the order of questions, the store of answers, the session, files of other tools."""
