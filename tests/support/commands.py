from streamclr.cli.commands import SECTIONS, Command

# Full name: command.
COMMANDS: dict[str, Command] = {
    " ".join(words): command
    for section in SECTIONS.values()
    for name, entry in section.items()
    for *words, command in (
        [(name, entry)] if isinstance(entry, Command) else [(name, sub, c) for sub, c in entry.commands.items()]
    )
}
