// Execute chat templates with the data that Ollama passes to them: JSON from stdin to JSON on stdout.
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"text/template"
	"text/template/parse"
)

// JSON prints a value as JSON, as Ollama's types of tools and arguments do.
type JSON map[string]any

func (value JSON) String() string { return toJSON(value) }

func toJSON(value any) string {
	text, err := json.Marshal(value)
	check(err)
	return string(text)
}

type ToolFunction JSON

func (function ToolFunction) String() string { return toJSON(function) }

type Tool struct {
	Type     string       `json:"type"`
	Function ToolFunction `json:"function"`
}

func (tool Tool) String() string { return toJSON(tool) }

type ToolCall struct {
	Function struct {
		Name      string
		Arguments JSON
	}
}

type Message struct {
	Role      string
	Content   string
	ToolCalls []ToolCall `json:"tool_calls"`
}

type Chat struct {
	Messages []*Message
	Tools    []Tool
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// firstText returns the first text in nodes; with afterCalls, the first text in the first condition on .ToolCalls.
// Ollama recognizes the tool calls of a model by this text, up to the first brace.
func firstText(list *parse.ListNode, afterCalls bool) *parse.TextNode {
	if list == nil {
		return nil
	}
	for _, node := range list.Nodes {
		var lists []*parse.ListNode
		switch node := node.(type) {
		case *parse.TextNode:
			if !afterCalls {
				return node
			}
		case *parse.IfNode:
			if afterCalls && strings.Contains(node.Pipe.String(), ".ToolCalls") {
				return firstText(node.List, false)
			}
			lists = []*parse.ListNode{node.List, node.ElseList}
		case *parse.RangeNode:
			lists = []*parse.ListNode{node.List, node.ElseList}
		}
		for _, list := range lists {
			if text := firstText(list, afterCalls); text != nil {
				return text
			}
		}
	}
	return nil
}

func main() {
	var input struct {
		Template string
		Chats    []Chat
	}
	check(json.NewDecoder(os.Stdin).Decode(&input))
	functions := template.FuncMap{"json": toJSON}
	parsed, err := template.New("").Option("missingkey=zero").Funcs(functions).Parse(input.Template)
	check(err)
	texts := []string{}
	for _, chat := range input.Chats {
		var systems []string
		for _, message := range chat.Messages {
			if message.Role == "system" {
				systems = append(systems, message.Content)
			}
		}
		var text bytes.Buffer
		data := map[string]any{"System": strings.Join(systems, "\n\n"), "Messages": chat.Messages, "Tools": chat.Tools}
		check(parsed.Execute(&text, data))
		texts = append(texts, text.String())
	}
	mark := ""
	if text := firstText(parsed.Root, true); text != nil {
		mark, _, _ = strings.Cut(string(text.Text), "{")
	}
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{"texts": texts, "mark": strings.TrimSpace(mark)}))
}
