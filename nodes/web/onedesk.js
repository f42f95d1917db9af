// Shows what a writing node wrote: streamed while it runs, and again when ComfyUI answers it from its cache or the page is opened anew.
import { app } from "../../scripts/app.js";

// ComfyUI streams progress text into the widget of this name, and makes one of its own where there is none.
const NAME = "$$node-text-preview";
const NODES = ["OnedeskGenerate", "OnedeskRelease", "OnedeskMemory"];
const MIN_HEIGHT = 80;

function addTextWidget(node) {
  const area = document.createElement("textarea");
  area.className = "comfy-multiline-input";
  area.readOnly = true;
  area.placeholder = "…";
  const setValue = (text) => {
    const following = area.scrollTop + area.clientHeight >= area.scrollHeight - 4;
    area.value = text ?? "";
    if (following) area.scrollTop = area.scrollHeight;
  };
  const widget = node.addDOMWidget(NAME, "onedeskText", area, {
    getValue: () => area.value,
    setValue,
    getMinHeight: () => MIN_HEIGHT,
    serialize: false,
  });
  // What was written belongs to the run, not to the workflow file.
  widget.serialize = false;
}

function show(node, output) {
  const texts = output?.text;
  const widget = node?.widgets?.find((w) => w.name === NAME);
  if (!texts || !widget) return;
  const blocks = texts.map((text, i) => {
    const number = texts.length > 1 ? `[${i + 1}/${texts.length}] ` : "";
    const line = output.stats?.[i] ? `\n\n${output.stats[i]}` : "";
    return `${number}${text}${line}`;
  });
  widget.value = blocks.join("\n\n");
}

app.registerExtension({
  name: "Onedesk.Text",
  nodeCreated(node) {
    if (!NODES.includes(node.comfyClass)) return;
    addTextWidget(node);
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.call(this, output);
      show(this, output);
    };
  },
  // Outputs that come with a workflow's history when the page is opened anew.
  onNodeOutputsUpdated(outputs) {
    for (const [id, output] of Object.entries(outputs)) {
      const node = app.rootGraph?.getNodeById(Number(id));
      if (NODES.includes(node?.comfyClass)) show(node, output);
    }
  },
});
