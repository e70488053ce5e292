"""Prints docs/serve-settings.md from the fields of ServeConfig."""

from protodcs.serve.settings import ServeConfig

if __name__ == "__main__":
    print("| setting | default | meaning |\n|---|---|---|")
    for name, field in ServeConfig.model_fields.items():
        print(f"| `{name}` | `{field.default}` | {field.description or ''} |")
