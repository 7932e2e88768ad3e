"""`toto-compat schema`: the JSON Schemas of the files that a user writes, and what every gate means."""

import json

import click

from toto_compat.matrix.load import gates_markdown, json_schema_text
from toto_compat.repro.incident import Incident


def incident_schema_text() -> str:
    """Write the JSON Schema of an incident, as committed in incidents/incident.schema.json."""
    schema = Incident.model_json_schema(by_alias=True)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


@click.command("schema")
@click.option("--gates", is_flag=True, help="Print what every gate means instead, as Markdown.")
@click.option("--incident", is_flag=True, help="Print the JSON Schema of an incident for `repro` instead.")
def schema_command(gates: bool, incident: bool) -> None:
    """Print the JSON Schema of matrix.yaml, for editors and other tools."""
    if gates and incident:
        raise click.UsageError("--gates and --incident are two files: name one")
    click.echo(gates_markdown() if gates else incident_schema_text() if incident else json_schema_text(), nl=False)
