"""Models for other programs: Hugging Face directories, GGUF files and PEFT adapters, compared with the run."""

from zero2all.export.run_export import ExportResult, export_adapter_of_run, export_run

__all__ = ["ExportResult", "export_adapter_of_run", "export_run"]
